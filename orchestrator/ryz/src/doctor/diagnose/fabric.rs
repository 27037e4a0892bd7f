use crate::doctor::facts::{Fabric, InfinibandPort, VerbsPort};
use crate::doctor::finding::{Finding, Status};

fn new(name: &'static str, status: Status, seen: impl Into<String>) -> Finding {
    Finding::new("network", name, status, seen)
}

/// Without an adapter, this reports only the tools that are installed.
pub(super) fn diagnose(ports: &[InfinibandPort], fabric: &Fabric) -> Vec<Finding> {
    let mut findings = verbs(ports, fabric);
    let has_adapter = !ports.is_empty();
    findings
        .extend(ports.iter().find(|port| port.state == "ACTIVE").map(|port| write_bandwidth(port, fabric)));
    findings.extend(ucx(fabric, has_adapter));
    findings.extend(sharp(fabric, has_adapter));
    findings
}

/// The kernel shows adapters that programs may be unable to open: in a container, or without the adapter's library.
fn verbs(ports: &[InfinibandPort], fabric: &Fabric) -> Vec<Finding> {
    if ports.is_empty() {
        return Vec::new();
    }
    let unusable = |seen: String| {
        new("ibv_devinfo", Status::Warning, seen)
            .because("the kernel has adapters that programs cannot open, so NCCL and UCX go over TCP")
            .remedy(
                "install the adapters' library (ibverbs-providers, or rdma-core); start a container with \
                 --device /dev/infiniband --ulimit memlock=-1",
            )
    };
    let listed = match &fabric.verbs {
        None => {
            return vec![
                new("ibv_devinfo", Status::Info, "not installed")
                    .because("whether programs can open the adapters is not known")
                    .remedy("install ibverbs-utils (Debian, Ubuntu) or libibverbs-utils (Fedora, RHEL)"),
            ];
        }
        Some(Err(why)) => return vec![unusable(why.clone())],
        Some(Ok(listed)) => listed,
    };
    let one = |port: &InfinibandPort| match listed.iter().find(|listed| listed.name == port.name) {
        None => unusable("does not list it".into()).of(&port.name),
        Some(VerbsPort { active_mtu: Some(active), max_mtu: Some(most), .. }) if active < most => {
            new("ibv_devinfo", Status::Info, format!("MTU {active}, of at most {most}"))
                .of(&port.name)
                .because("a message takes more packets")
                .remedy("raise the MTU of the switch and, on RoCE, of the interface")
        }
        Some(VerbsPort { active_mtu, .. }) => {
            let mtu = active_mtu.map_or("opens it".into(), |mtu| format!("MTU {mtu}"));
            new("ibv_devinfo", Status::Ok, mtu).of(&port.name)
        }
    };
    ports.iter().map(one).collect()
}

/// Says how to measure, and does not: it takes two hosts.
fn write_bandwidth(port: &InfinibandPort, fabric: &Fabric) -> Finding {
    let Some(file) = &fabric.write_bandwidth else {
        return new("ib_write_bw", Status::Info, "not installed")
            .because("it measures the bandwidth of InfiniBand between two hosts")
            .remedy("install perftest on both");
    };
    let (adapter, number) = port.name.split_once(':').unwrap_or((&port.name, "1"));
    let command = format!("ib_write_bw -d {adapter} -i {number} --report_gbits");
    new("ib_write_bw", Status::Info, format!("{}; not started", file.display()))
        .because(format!("it measures between two hosts, and should come close to the rate {}", port.rate))
        .remedy(format!("to measure: `{command}` on one host, then `{command} HOST` on the other"))
}

fn ucx(fabric: &Fabric, has_adapter: bool) -> Option<Finding> {
    match &fabric.ucx {
        Some(Ok(version)) => Some(new("ucx", Status::Ok, version)),
        Some(Err(why)) => {
            Some(new("ucx", Status::Info, format!("ucx_info: {why}")).because("UCX may be broken"))
        }
        None => has_adapter.then(|| {
            new("ucx", Status::Info, "not installed").because(
                "programs such as Open MPI use InfiniBand through it; Ryzanstein and NCCL do not need it",
            )
        }),
    }
}

fn sharp(fabric: &Fabric, has_adapter: bool) -> Option<Finding> {
    let found: Vec<String> = [&fabric.sharp, &fabric.nccl_plugin]
        .into_iter()
        .flatten()
        .map(|file| file.display().to_string())
        .collect();
    if fabric.sharp.is_some() && fabric.nccl_plugin.is_some() {
        return Some(new("sharp", Status::Ok, found.join(", ")));
    }
    if found.is_empty() && !has_adapter {
        return None;
    }
    let seen = match (&fabric.sharp, &fabric.nccl_plugin) {
        (Some(_), _) => format!("{}, without a network plugin of NCCL (libnccl-net*.so)", found[0]),
        (_, Some(_)) => format!("{}, without SHARP's library (libsharp_coll.so)", found[0]),
        _ => {
            "neither SHARP's library (libsharp_coll.so) nor a network plugin of NCCL (libnccl-net*.so)".into()
        }
    };
    Some(
        new("sharp", Status::Info, seen)
            .because("NCCL needs both to let Quantum switches add up; without, the GPUs do")
            .remedy("with such switches: install HPC-X, and set NCCL_COLLNET_ENABLE=1"),
    )
}
