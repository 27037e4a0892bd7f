//! Findings about InfiniBand and what is installed for it, and about the variables of CUDA and UCX.

use super::*;

/// A machine with two ports, everything installed.
fn with_ports() -> Facts {
    let port = |name: &str| InfinibandPort {
        name: name.into(),
        state: "ACTIVE".into(),
        rate: "400 Gb/sec (4X NDR)".into(),
        link_layer: "InfiniBand".into(),
        firmware: "28.39.1002".into(),
        ..InfinibandPort::default()
    };
    let listed = |name: &str| VerbsPort { name: name.into(), active_mtu: Some(4096), max_mtu: Some(4096) };
    let mut facts = plain();
    facts.network.infiniband = vec![port("mlx5_0:1"), port("mlx5_1:1")];
    facts.fabric = Fabric {
        verbs: Some(Ok(vec![listed("mlx5_0:1"), listed("mlx5_1:1")])),
        write_bandwidth: Some("/usr/bin/ib_write_bw".into()),
        ucx: Some(Ok("1.17.0, /usr/bin/ucx_info".into())),
        sharp: Some("/opt/mellanox/sharp/lib/libsharp_coll.so".into()),
        nccl_plugin: Some("/opt/hpcx/lib/libnccl-net.so".into()),
    };
    facts
}

#[test]
fn each_state_of_a_fabric_is_told_of() {
    let rows: &[Row] = &[
        (|_| {}, "infiniband", Status::Ok, "ACTIVE, 400 Gb/sec (4X NDR), InfiniBand, firmware 28.39.1002"),
        (|_| {}, "ibv_devinfo", Status::Ok, "MTU 4096"),
        (|f| f.fabric.verbs = None, "ibv_devinfo", Status::Info, "ibverbs-utils"),
        // The container has /sys, but not the devices.
        (
            |f| f.fabric.verbs = Some(failed("No IB devices found")),
            "ibv_devinfo",
            Status::Warning,
            "--device /dev/infiniband",
        ),
        (
            |f| {
                f.fabric.verbs.as_mut().and_then(|v| v.as_mut().ok()).expect("listed").pop();
            },
            "ibv_devinfo",
            Status::Warning,
            "does not list it",
        ),
        (
            |f| {
                f.fabric.verbs.as_mut().and_then(|v| v.as_mut().ok()).expect("listed")[0].active_mtu =
                    Some(1024);
            },
            "ibv_devinfo",
            Status::Info,
            "MTU 1024, of at most 4096",
        ),
        (
            |_| {},
            "ib_write_bw",
            Status::Info,
            "`ib_write_bw -d mlx5_0 -i 1 --report_gbits HOST` on the other",
        ),
        (|f| f.fabric.write_bandwidth = None, "ib_write_bw", Status::Info, "perftest"),
        (|_| {}, "ucx", Status::Ok, "1.17.0"),
        (|f| f.fabric.ucx = None, "ucx", Status::Info, "do not need it"),
        (|f| f.fabric.ucx = Some(failed("exit status: 127")), "ucx", Status::Info, "exit status: 127"),
        (|_| {}, "sharp", Status::Ok, "libsharp_coll.so, /opt/hpcx/lib/libnccl-net.so"),
        (|f| f.fabric.sharp = None, "sharp", Status::Info, "without SHARP's library"),
        (|f| f.fabric.nccl_plugin = None, "sharp", Status::Info, "without a network plugin"),
        (
            |f| (f.fabric.sharp, f.fabric.nccl_plugin) = (None, None),
            "sharp",
            Status::Info,
            "NCCL_COLLNET_ENABLE",
        ),
    ];
    for (index, (change, name, status, word)) in rows.iter().enumerate() {
        let mut facts = with_ports();
        change(&mut facts);
        check_worst(index, &facts, name, *status, word);
    }
}

#[test]
fn without_an_adapter_only_what_is_installed_is_told_of() {
    let names = |facts: &Facts| -> Vec<&str> {
        let all = ["ibv_devinfo", "ib_write_bw", "ucx", "sharp"];
        let found = diagnose(facts);
        all.into_iter().filter(|name| found.iter().any(|f| f.name == *name)).collect()
    };
    assert!(names(&plain()).is_empty());
    let mut facts = with_ports();
    facts.network.infiniband.clear();
    // It fails without adapters, which is no fault.
    facts.fabric.verbs = Some(failed("No IB devices found"));
    assert_eq!(names(&facts), ["ucx", "sharp"]);
    assert_eq!(report(&facts).status, Status::Ok);
}

#[test]
fn variables_of_cuda_and_ucx_are_shown_but_no_secret() {
    let mut facts = plain();
    let set = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    facts.variables = vec![
        set("CUDA_LAUNCH_BLOCKING", "1"),
        set("CUDA_VISIBLE_DEVICES", ""),
        set("UCX_API_TOKEN", "hush"),
        set("UCX_TLS", "rc,cuda_copy"),
    ];
    let nccl = UserVariable { name: "NCCL_PLUGIN_SECRET".into(), value: "hush".into(), file: None };
    facts.nccl = plan(&ryzanstein_config::Config::default(), &[nccl]);
    let findings = diagnose(&facts);
    let of = |name: &str| findings.iter().find(|f| f.subject.as_deref() == Some(name)).expect("shown");
    assert_eq!(of("CUDA_LAUNCH_BLOCKING").status, Status::Warning);
    assert_eq!(of("CUDA_VISIBLE_DEVICES").seen, "empty");
    assert_eq!((of("UCX_TLS").status, of("UCX_TLS").seen.as_str()), (Status::Info, "rc,cuda_copy"));
    assert!(of("UCX_API_TOKEN").seen.contains("not shown"));
    assert!(!crate::command::json(&report(&facts)).contains("hush"));
}
