//! Invented facts of known kinds of machines, so that their topology can be shown on any machine.

use std::collections::BTreeMap;

use clap::ValueEnum as _;
use ryzanstein_process_group::nvml::{Gpu, Pair, PairPath, PeerAccess};

use super::{Topology, pci_path};
use crate::doctor::{DriverFacts, Hardware, InfinibandPort, Interface, Network, NumaNode, PciPlace};

/// A kind of machine.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Preset {
    /// Eight H100 behind NVSwitches, each with an InfiniBand adapter on its PCIe switch.
    DgxH100,
    /// A compute tray of GB200 NVL72: four of the 72 GPUs that NVSwitches join, each with an InfiniBand adapter.
    Gb200Nvl72,
    /// Four L40S with PCIe only.
    PcieOnly,
    /// Four A100 on PCIe, in pairs that an NVLink bridge joins.
    Hybrid,
}

impl Preset {
    /// Returns the topology of such a machine.
    pub fn topology(self) -> Topology {
        let name = self.to_possible_value().map(|value| value.get_name().to_owned());
        Topology { preset: name, ..Topology::of(&self.hardware()) }
    }

    /// Returns the results of a probe of such a machine.
    pub fn hardware(self) -> Hardware {
        match self {
            Self::DgxH100 => Machine {
                gpu: "NVIDIA H100 80GB HBM3",
                gpus: 8,
                links: (18, 25.0),
                // All GPUs are one NVLink domain.
                bridged: 8,
                processors: ["0-55,112-167", "56-111,168-223"],
                infiniband: Some(("400 Gb/sec (4X NDR)", 8)),
            },
            Self::Gb200Nvl72 => Machine {
                gpu: "NVIDIA GB200",
                gpus: 4,
                links: (18, 50.0),
                bridged: 4,
                processors: ["0-71", "72-143"],
                infiniband: Some(("400 Gb/sec (4X NDR)", 4)),
            },
            Self::PcieOnly => Machine {
                gpu: "NVIDIA L40S",
                gpus: 4,
                links: (0, 0.0),
                bridged: 1,
                processors: ["0-31", "32-63"],
                infiniband: None,
            },
            Self::Hybrid => Machine {
                gpu: "NVIDIA A100 80GB PCIe",
                gpus: 4,
                links: (12, 25.0),
                bridged: 2,
                processors: ["0-31", "32-63"],
                infiniband: Some(("200 Gb/sec (4X HDR)", 1)),
            },
        }
        .hardware()
    }
}

/// A machine with two processors, each with half the GPUs.
struct Machine {
    gpu: &'static str,
    gpus: u32,
    /// Number of NVLinks of a GPU, and the bandwidth of each in one direction in GB/s.
    links: (u32, f64),
    /// Number of consecutive GPUs that are joined by NVLink.
    bridged: u32,
    processors: [&'static str; 2],
    /// Rate and number of the InfiniBand adapters, each next to a GPU; `None` for an Ethernet adapter alone.
    infiniband: Option<(&'static str, usize)>,
}

impl Machine {
    fn hardware(&self) -> Hardware {
        let places: Vec<PciPlace> = (0..self.gpus).map(|gpu| self.place(gpu, 0)).collect();
        let adapters: Vec<PciPlace> = (0..self.gpus).map(|gpu| self.place(gpu, 1)).collect();
        let (links, each) = self.links;
        let gpu = |index: u32| Gpu {
            index,
            name: self.gpu.into(),
            nvlinks: links,
            nvlink_gbs: (links > 0).then_some(each),
            ..Gpu::default()
        };
        let between = |a: u32, b: u32| {
            let is_bridged = links > 0 && a / self.bridged == b / self.bridged;
            let place = |gpu: u32| &places[gpu as usize];
            let path = if is_bridged { PairPath::Nvlink(links) } else { pci_path(place(a), place(b)) };
            let nvlink_gbs = is_bridged.then_some(each * f64::from(links));
            Pair { a, b, path, peer_access: PeerAccess::Yes, nvlink_gbs }
        };
        let numbers = 0..self.gpus;
        let pairs = numbers.clone().flat_map(|a| (a + 1..self.gpus).map(move |b| (a, b)));
        let driver = DriverFacts {
            gpus: numbers.clone().map(gpu).collect(),
            pairs: pairs.map(|(a, b)| between(a, b)).collect(),
            places: numbers.zip(places.clone()).collect::<BTreeMap<_, _>>(),
            ..DriverFacts::default()
        };
        let ethernet = Interface {
            name: "ens1np0".into(),
            speed: Some(100_000),
            state: "up".into(),
            pci: adapters.first().cloned(),
            ..Interface::default()
        };
        let node = |(id, processors): (u32, &str)| NumaNode { id, processors: processors.into() };
        Hardware {
            host: "example".into(),
            driver: Ok(driver),
            network: Network {
                interfaces: if self.infiniband.is_none() { vec![ethernet] } else { Vec::new() },
                loopback: Ok(()),
                infiniband: self
                    .infiniband
                    .map_or_else(Vec::new, |(rate, count)| ports(rate, &adapters[..count])),
                peer_memory_module: false,
            },
            numa_nodes: (0..).zip(self.processors).map(node).collect(),
        }
    }

    /// Returns the position below the switch of this GPU, at this port: the GPU at 0, an adapter at 1. Each switch has a
    /// separate host bridge.
    fn place(&self, gpu: u32, port: u32) -> PciPlace {
        let bus = 0x10 * (gpu + 1);
        let path = [
            format!("pci0000:{bus:02x}"),
            format!("0000:{bus:02x}:01.0"),
            format!("0000:{:02x}:00.0", bus + 1),
            format!("0000:{:02x}:{port:02x}.0", bus + 2),
            format!("0000:{:02x}:00.0", bus + 3 + port),
        ];
        PciPlace { path: path.into(), numa_node: Some(gpu * 2 / self.gpus) }
    }
}

/// Returns an InfiniBand adapter at each position.
fn ports(rate: &str, places: &[PciPlace]) -> Vec<InfinibandPort> {
    let port = |(index, place): (usize, &PciPlace)| InfinibandPort {
        name: format!("mlx5_{index}:1"),
        state: "ACTIVE".into(),
        rate: rate.into(),
        link_layer: "InfiniBand".into(),
        pci: Some(place.clone()),
        ..InfinibandPort::default()
    };
    places.iter().enumerate().map(port).collect()
}
