use std::path::PathBuf;

use ryzanstein_config::BackendChoice;
use ryzanstein_config::InstructionSet;
use ryzanstein_config::nccl::{UserVariable, plan};
use ryzanstein_orchestrator::table::Screen;
use ryzanstein_process_group::nvml::{Gpu, Pair, PairPath, PeerAccess};

use super::*;
use crate::doctor::facts::*;
use crate::doctor::finding::{Report, Status};

mod fabric;
mod gpus;

const GIB: u64 = 1 << 30;

/// Returns the result of a probe that failed.
fn failed<T>(why: &str) -> Result<T, String> {
    Err(why.into())
}

/// Returns a fault-free machine without GPUs.
fn plain() -> Facts {
    Facts {
        host: Host {
            system: "Linux".into(),
            processors: 8,
            instruction_sets: vec![InstructionSet::Avx2, InstructionSet::Scalar],
            asked_instruction_set: None,
            processors_online: 8,
            load: Some(0.1),
            processor_quota: None,
            memory_limit: None,
            locked_memory: None,
            memory: 64 * GIB,
            memory_available: 32 * GIB,
            shared_memory: Some((8 * GIB, 8 * GIB)),
            open_files: (Some(1024), Some(65536)),
            temporary: TemporaryFolder { path: PathBuf::from("/tmp"), writable: Ok(()) },
        },
        network: Network {
            loopback: Ok(()),
            interfaces: Vec::new(),
            infiniband: Vec::new(),
            peer_memory_module: false,
        },
        fabric: Fabric::default(),
        gpu: GpuFacts {
            on_bus: 0,
            module: None,
            driver: failed("libnvidia-ml.so.1: not there"),
            visible: None,
            shown: Ok(Vec::new()),
        },
        libraries: libraries(&["cuda_driver", "nccl", "nvrtc", "cublaslt"], false),
        nccl: Vec::new(),
        variables: Vec::new(),
        backend: BackendChoice::Auto,
        trials: vec![trial("all_reduce_tcp", "tcp")],
    }
}

fn libraries(names: &[&'static str], there: bool) -> Vec<Library> {
    let found = |name: &str| {
        if there { Ok(format!("13.0.0, lib{name}.so")) } else { failed("was not found") }
    };
    names.iter().map(|name| Library { name, needed_for: "something", found: found(name) }).collect()
}

fn trial(name: &'static str, backend: &str) -> Trial {
    let outcome = TrialOutcome {
        backend: backend.into(),
        ready_ms: 3.0,
        median_us: Some(20.0),
        ..TrialOutcome::default()
    };
    Trial { name, ranks: 2, outcome: Ok(outcome) }
}

fn gpu(index: u32) -> Gpu {
    Gpu {
        index,
        name: "NVIDIA H200".into(),
        uuid: format!("GPU-{index}"),
        pci: format!("00000000:{:02X}:00.0", index + 26),
        memory_bytes: 140 * GIB,
        memory_used_bytes: GIB / 2,
        ecc: Some(true),
        temperature: Some(30),
        slowdown_temperature: Some(87),
        nvlinks: 18,
        nvlink_gbs: Some(26.5),
        ..Gpu::default()
    }
}

/// Returns the same GPU as CUDA reports it.
fn shown(gpu: &Gpu) -> VisibleGpu {
    VisibleGpu { uuid: gpu.uuid.clone(), pci: format!("0000:{:02x}:00.0", gpu.index + 26) }
}

/// Sets `CUDA_VISIBLE_DEVICES` to `list`, which shows these GPUs.
fn show(facts: &mut Facts, list: &str, gpus: &[u32]) {
    facts.gpu.visible = Some(list.into());
    facts.gpu.shown = Ok(gpus.iter().map(|index| shown(&gpu(*index))).collect());
}

/// Returns a machine with `count` GPUs, joined by `path`.
fn with_gpus(count: u32, path: PairPath, peer_access: &PeerAccess) -> Facts {
    let mut pairs = Vec::new();
    for a in 0..count {
        for b in a + 1..count {
            pairs.push(Pair { a, b, path, peer_access: peer_access.clone(), nvlink_gbs: None });
        }
    }
    let driver = DriverFacts {
        version: "580.1".into(),
        cuda: Some((13, 0)),
        gpus: (0..count).map(gpu).collect(),
        pairs,
        ..DriverFacts::default()
    };
    let mut facts = plain();
    facts.gpu = GpuFacts {
        on_bus: count as usize,
        module: Some("580.1".into()),
        shown: Ok(driver.gpus.iter().map(shown).collect()),
        driver: Ok(driver),
        visible: None,
    };
    facts.libraries = libraries(&["cuda_driver", "nccl", "nvrtc", "cublaslt"], true);
    facts.trials.push(trial("all_reduce_gpu", "nccl"));
    facts
}

fn h200() -> Facts {
    with_gpus(4, PairPath::Nvlink(18), &PeerAccess::Yes)
}

fn driver(facts: &mut Facts) -> &mut DriverFacts {
    facts.gpu.driver.as_mut().expect("there is a driver")
}

fn report(facts: &Facts) -> Report {
    let driver = facts.gpu.driver.as_ref().ok().cloned().unwrap_or_default();
    Report::new("node0".into(), diagnose(facts), driver.gpus, driver.pairs)
}

/// Checks the worst finding of a name: its status, and a word of its texts. Returns all findings.
fn check_worst(index: usize, facts: &Facts, name: &str, status: Status, word: &str) -> Vec<Finding> {
    let findings = diagnose(facts);
    let worst = findings.iter().filter(|f| f.name == name).max_by_key(|f| f.status);
    let worst = worst.unwrap_or_else(|| panic!("row {index}: nothing is said of {name}"));
    assert_eq!(worst.status, status, "row {index}: {worst:?}");
    let said = format!("{} {:?} {:?}", worst.seen, worst.cause, worst.remedy);
    assert!(said.contains(word), "row {index}: `{word}` is not in {said}");
    findings
}

#[test]
fn a_machine_without_gpus_is_healthy_and_is_told_how_to_get_them() {
    let report = report(&plain());
    assert_eq!((report.status, report.exit_code()), (Status::Ok, 0));
    let gpus = report.findings.iter().find(|f| f.name == "gpus").expect("said");
    assert!(gpus.seen.contains("CPU"));
    assert!(gpus.remedy.as_ref().is_some_and(|remedy| remedy.contains("--gpus all")));
}

#[test]
fn a_machine_with_gpus_that_all_work_is_healthy() {
    let report = report(&h200());
    let bad: Vec<_> = report.findings.iter().filter(|f| f.status > Status::Info).collect();
    assert_eq!(bad, Vec::<&Finding>::new());
    assert!(report.table(Screen::PLAIN).contains("NV18"), "{}", report.table(Screen::PLAIN));
}

/// A change to a machine, and the expected finding: name, status, a word of the cause or remedy.
type Row = (fn(&mut Facts), &'static str, Status, &'static str);

#[test]
fn each_fault_is_found_with_a_cause_or_a_remedy() {
    let rows: &[Row] = &[
        // The default of a container engine.
        (
            |f| f.host.shared_memory = Some((64 << 20, 64 << 20)),
            "shared_memory",
            Status::Warning,
            "--shm-size",
        ),
        (|f| f.host.shared_memory = None, "shared_memory", Status::Warning, "mount"),
        // Large, but full.
        (|f| f.host.shared_memory = Some((8 * GIB, 1 << 20)), "shared_memory", Status::Warning, "bus error"),
        (|f| f.host.memory_available = GIB / 2, "memory", Status::Warning, "limit"),
        // Enough memory is free, but the cgroup does not allow it.
        (|f| f.host.memory_limit = Some(GIB / 2), "memory", Status::Warning, "limit"),
        (|f| f.host.processor_quota = Some(0.5), "processors", Status::Warning, "CPU limit"),
        (
            |f| f.host.asked_instruction_set = Some(InstructionSet::Amx),
            "instruction_set",
            Status::Broken,
            "avx2, scalar",
        ),
        (
            |f| f.host.asked_instruction_set = Some(InstructionSet::Scalar),
            "instruction_set",
            Status::Ok,
            "scalar, as model.instruction_set; also avx2",
        ),
        (|f| f.host.locked_memory = Some(64 << 10), "locked_memory", Status::Info, "memlock"),
        (|f| f.host.open_files = (Some(256), Some(256)), "open_files", Status::Warning, "nofile"),
        (|f| f.host.temporary.writable = failed("read-only"), "temporary_folder", Status::Warning, "TMPDIR"),
        (|f| f.network.loopback = failed("refused"), "loopback", Status::Broken, "ip link set lo up"),
        (
            |f| {
                f.network.infiniband = vec![InfinibandPort {
                    name: "mlx5_0:1".into(),
                    state: "DOWN".into(),
                    ..InfinibandPort::default()
                }];
            },
            "infiniband",
            Status::Warning,
            "ibstat",
        ),
        // Adapters and GPUs without a path between them.
        (
            |f| {
                f.network.infiniband = vec![InfinibandPort {
                    name: "mlx5_0:1".into(),
                    state: "ACTIVE".into(),
                    ..InfinibandPort::default()
                }];
            },
            "gpu_direct",
            Status::Info,
            "modprobe",
        ),
        (|f| driver(f).gpus[1].ecc_uncorrected = Some(1), "gpu", Status::Broken, "ECC"),
        (|f| driver(f).gpus[1].temperature = Some(84), "gpu", Status::Warning, "87 °C"),
        (
            |f| driver(f).gpus[1].throttled_by = vec!["heat (hardware)".into()],
            "gpu",
            Status::Warning,
            "cooling",
        ),
        // At its power limit a GPU runs at full power.
        (
            |f| driver(f).gpus[1].throttled_by = vec!["the power limit".into()],
            "gpu",
            Status::Info,
            "power limit",
        ),
        (|f| driver(f).gpus[1].mig = Some(true), "gpu", Status::Warning, "MIG"),
        (|f| driver(f).gpus[1].memory_used_bytes = 70 * GIB, "gpu", Status::Warning, "in use already"),
        (|f| driver(f).gpus[1].prohibited = true, "gpu", Status::Broken, "compute mode"),
        (|f| driver(f).gpus[1].nvlinks_down = 2, "gpu", Status::Warning, "fabricmanager"),
        (|f| driver(f).gpus[1].nvlinks = 12, "nvlink", Status::Warning, "slowest"),
        (
            |f| driver(f).pairs[0].peer_access = PeerAccess::No("the chipset does not support it".into()),
            "peer_access",
            Status::Warning,
            "chipset",
        ),
        (|f| show(f, "", &[]), "visible_devices", Status::Warning, "unset"),
        // CUDA shows no GPU, although the variable is not set.
        (|f| f.gpu.shown = Ok(Vec::new()), "visible_devices", Status::Warning, "/dev/nvidia"),
        (|f| f.gpu.shown = failed("cuInit: 999"), "visible_devices", Status::Info, "cuInit: 999"),
        (
            |f| {
                show(f, "-1", &[]);
                f.backend = BackendChoice::Nccl;
            },
            "gpus",
            Status::Broken,
            "CUDA shows this process none",
        ),
        (|f| f.libraries = libraries(&["nccl"], false), "nccl", Status::Broken, "device.nccl"),
        (|f| f.trials[0].outcome = failed("rank 1 hung"), "all_reduce_tcp", Status::Broken, "RYZ_LOG__LEVEL"),
        (|f| f.trials[1] = trial("all_reduce_gpu", "tcp"), "all_reduce_gpu", Status::Warning, "libraries"),
        // The kernel has the driver, but the container does not.
        (|f| f.gpu.driver = failed("not there"), "driver", Status::Broken, "--gpus all"),
        (
            |f| {
                f.gpu.driver = failed("not there");
                f.gpu.module = None;
            },
            "driver",
            Status::Broken,
            "on the PCI bus",
        ),
        (
            |f| {
                *driver(f) = DriverFacts::default();
                f.backend = BackendChoice::Nccl;
            },
            "gpus",
            Status::Broken,
            "process_group.backend",
        ),
    ];
    for (index, (change, name, status, word)) in rows.iter().enumerate() {
        let mut facts = h200();
        change(&mut facts);
        let findings = check_worst(index, &facts, name, *status, word);
        let exit = match findings.iter().map(|f| f.status).max() {
            Some(Status::Broken) => 2,
            Some(Status::Warning) => 1,
            _ => 0,
        };
        assert_eq!(report(&facts).exit_code(), exit, "row {index}");
    }
}

#[test]
fn whatever_is_worse_than_ok_explains_itself() {
    let mut facts = plain();
    facts.host.shared_memory = None;
    facts.backend = BackendChoice::Nccl;
    for finding in diagnose(&facts).into_iter().filter(|f| f.status > Status::Info) {
        assert!(finding.cause.is_some() && finding.remedy.is_some(), "{finding:?}");
    }
}

#[test]
fn variables_of_nccl_are_shown_with_who_set_them_and_strange_ones_flagged() {
    let own = |name: &str, value: &str| UserVariable { name: name.into(), value: value.into(), file: None };
    let mut facts = plain();
    facts.nccl = plan(
        &ryzanstein_config::Config::default(),
        &[
            own("NCCL_TIMEOUT", "600"),
            own("NCCL_DEBUG", "INFO"),
            own("NCCL_NVLS_ENABLE", "0"),
            own("NCCL_DEBGU", "INFO"),
        ],
    );
    let findings = diagnose(&facts);
    let of = |subject: &str| findings.iter().find(|f| f.subject.as_deref() == Some(subject)).expect("said");
    assert_eq!(of("NCCL_TIMEOUT").status, Status::Warning);
    assert!(of("NCCL_TIMEOUT").remedy.as_ref().is_some_and(|r| r.contains("process_group.timeout")));
    assert_eq!(of("NCCL_DEBGU").status, Status::Warning);
    assert!(of("NCCL_DEBGU").remedy.as_ref().is_some_and(|r| r.contains("NCCL_DEBUG")));
    assert_eq!(of("NCCL_DEBUG").status, Status::Info);
    assert!(of("NCCL_NVLS_ENABLE").cause.as_ref().is_some_and(|c| c.contains("stays off")));
}

#[test]
fn an_interface_for_nccl_that_does_not_exist_is_warned_of() {
    let mut facts = plain();
    facts.network.interfaces = ["lo", "eth0"]
        .map(|name| Interface {
            name: name.into(),
            addresses: Vec::new(),
            speed: None,
            loopback: name == "lo",
            state: "up".into(),
            pci: None,
        })
        .into();
    for (value, status) in [
        ("nosuch0", Status::Warning),
        ("=eth", Status::Warning),
        ("nosuch0,", Status::Warning),
        ("eth0:1234", Status::Info),
        ("ib,eth", Status::Info),
        ("=ib0,eth0", Status::Info),
        ("^docker", Status::Info),
    ] {
        let own = UserVariable { name: "NCCL_SOCKET_IFNAME".into(), value: value.into(), file: None };
        facts.nccl = plan(&ryzanstein_config::Config::default(), &[own]);
        let findings = diagnose(&facts);
        let of = findings.iter().find(|f| f.subject.as_deref() == Some("NCCL_SOCKET_IFNAME")).expect("said");
        assert_eq!(of.status, status, "{value}");
    }
}

#[test]
fn the_json_has_the_fields_that_are_documented() {
    let mut facts = h200();
    facts.host.shared_memory = None;
    let json: serde_json::Value = serde_json::to_value(report(&facts)).expect("one object");
    let keys = |value: &serde_json::Value| -> Vec<String> {
        let mut keys: Vec<String> = value.as_object().expect("an object").keys().cloned().collect();
        keys.sort();
        keys
    };
    assert_eq!(keys(&json), ["findings", "gpus", "host", "pairs", "status", "version"]);
    assert_eq!(json["status"], "warning");
    assert_eq!(keys(&json["findings"][0]), ["area", "cause", "name", "remedy", "seen", "status", "subject"]);
    assert_eq!(json["pairs"][0]["path"], serde_json::json!({"nvlink": 18}));
    assert_eq!(json["pairs"][0]["peer_access"], "yes");
    assert_eq!(json["gpus"].as_array().map(Vec::len), Some(4));
}

#[test]
fn memory_is_written_in_powers_of_1024() {
    assert_eq!(memory(140 * GIB), "140 GiB");
    assert_eq!(memory(GIB * 3 / 2), "1.5 GiB");
    assert_eq!(memory(512), "512 B");
}
