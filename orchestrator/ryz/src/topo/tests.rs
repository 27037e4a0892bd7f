use clap::ValueEnum as _;
use ryzanstein_process_group::nvml::PairPath;

use super::*;
use crate::doctor::Network;
use ryzanstein_orchestrator::table::Screen;

fn place(path: &[&str], numa_node: u32) -> PciPlace {
    PciPlace { path: path.iter().map(ToString::to_string).collect(), numa_node: Some(numa_node) }
}

/// Returns a machine without GPUs.
fn plain() -> Hardware {
    Hardware {
        host: "here".into(),
        driver: Err("libnvidia-ml.so.1: not there".into()),
        network: Network {
            interfaces: Vec::new(),
            loopback: Ok(()),
            infiniband: Vec::new(),
            peer_memory_module: false,
        },
        numa_nodes: vec![NumaNode { id: 0, processors: "0-1".into() }],
    }
}

#[test]
fn the_way_between_two_devices_follows_from_the_bridges_that_both_are_below() {
    let way = |a: &PciPlace, b: &PciPlace| {
        assert_eq!(pci_path(a, b), pci_path(b, a));
        pci_path(a, b)
    };
    let gpu = place(&["pci0000:00", "root", "switch", "port 0", "gpu"], 0);
    assert_eq!(way(&gpu, &place(&["pci0000:00", "root", "switch", "port 1", "nic"], 0)), PairPath::Switch);
    assert_eq!(
        way(&gpu, &place(&["pci0000:00", "root", "switch", "port 1", "switch 2", "port", "nic"], 0)),
        PairPath::Switches
    );
    assert_eq!(way(&gpu, &place(&["pci0000:00", "another root", "nic"], 0)), PairPath::HostBridge);
    assert_eq!(way(&gpu, &place(&["pci0000:80", "nic"], 0)), PairPath::Node);
    assert_eq!(way(&gpu, &place(&["pci0000:80", "nic"], 1)), PairPath::System);
}

#[test]
fn an_adapter_that_is_a_port_and_an_interface_is_one_device() {
    let pci = Some(place(&["pci0000:00", "0000:01:00.0"], 0));
    let port = InfinibandPort {
        name: "mlx5_0:1".into(),
        rate: "100 Gb/sec".into(),
        pci: pci.clone(),
        ..InfinibandPort::default()
    };
    let interface = Interface { name: "ens1".into(), speed: Some(100_000), pci, ..Interface::default() };
    let mut hardware = plain();
    hardware.network.interfaces = vec![Interface { name: "lo".into(), ..Interface::default() }, interface];
    hardware.network.infiniband = vec![port];
    let topology = Topology::of(&hardware);
    assert_eq!(topology.devices.len(), 1);
    assert_eq!(topology.devices[0].description, "mlx5_0:1 100 Gb/sec; ens1 100 Gb/s");
    assert_eq!(topology.devices[0].pci.as_deref(), Some("0000:01:00.0"));
}

#[test]
fn a_machine_without_gpus_says_why_there_are_none() {
    let text = Topology::of(&plain()).table(Screen::PLAIN);
    assert_eq!(text, "ryz topo on here\n\nNUMA node 0: CPUs 0-1\nno GPUs: libnvidia-ml.so.1: not there\n");
}

#[test]
fn every_matrix_is_symmetric() {
    for preset in Preset::value_variants() {
        let topology = preset.topology();
        for (i, row) in topology.matrix.iter().enumerate() {
            for (j, way) in row.iter().enumerate() {
                assert_eq!((*way, way.is_none()), (topology.matrix[j][i], i == j), "{preset:?}");
            }
        }
    }
}

#[test]
fn the_table_of_eight_gpus_fits_eighty_columns() {
    let text = Preset::DgxH100.topology().table(Screen { width: Some(80), color: false });
    assert!(text.lines().all(|line| line.chars().count() <= 80) && text.contains("0-55,112-167"), "{text}");
}

#[test]
fn the_table_of_gradients_has_the_published_sizes_and_the_times_of_a_ring() {
    let times = SyncTimes::new(8);
    let gigabytes: Vec<f64> =
        times.models.iter().map(|model| (model.bytes as f64 / 1e8).round() / 10.0).collect();
    assert_eq!(gigabytes, [0.1, 1.3, 6.2, 700.0]);
    let seconds = |name: &str, model: usize| {
        times.interconnects.iter().find(|on| on.name == name).expect("an interconnect").seconds[model]
    };
    // 102 MB, of which a ring of eight moves 7/4, at 25 GB/s.
    assert!((seconds("hdr", 0) / 7.19e-3 - 1.0).abs() < 0.01, "{times:?}");
    assert!((seconds("nvlink3", 1) / 7.83e-3 - 1.0).abs() < 0.01, "{times:?}");
    assert!(times.interconnects.iter().all(|on| on.seconds.is_sorted()), "{times:?}");
    let text = SyncTimes::new(1024).table(Screen { width: Some(80), color: false });
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}
