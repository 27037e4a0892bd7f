use crate::doctor::facts::{Interface, Network};
use crate::doctor::finding::{Finding, Status};

fn new(name: &'static str, status: Status, seen: impl Into<String>) -> Finding {
    Finding::new("network", name, status, seen)
}

pub(super) fn diagnose(network: &Network, gpus: usize) -> Vec<Finding> {
    let mut findings = vec![loopback(network), interfaces(network)];
    findings.extend(infiniband(network));
    findings.extend(gpu_direct(network, gpus));
    findings
}

fn loopback(network: &Network) -> Finding {
    match &network.loopback {
        Ok(()) => new("loopback", Status::Ok, "TCP on 127.0.0.1 carries bytes"),
        Err(why) => new("loopback", Status::Broken, format!("TCP on 127.0.0.1: {why}"))
            .because("the ranks of one host connect through it")
            .remedy(
                "bring the loopback interface up (ip link set lo up), and let packet filters pass 127.0.0.1",
            ),
    }
}

fn interfaces(network: &Network) -> Finding {
    let usable: Vec<String> = network
        .interfaces
        .iter()
        .filter(|interface| {
            !interface.loopback && interface.state != "down" && !interface.addresses.is_empty()
        })
        .map(describe)
        .collect();
    if usable.is_empty() {
        return new("interfaces", Status::Info, "only loopback")
            .because("jobs on this host work; other hosts cannot be reached");
    }
    new("interfaces", Status::Ok, usable.join("; "))
}

fn describe(interface: &Interface) -> String {
    let addresses: Vec<String> = interface.addresses.iter().map(ToString::to_string).collect();
    format!("{} {}, {}", interface.name, interface.rate(), addresses.join(", "))
}

fn infiniband(network: &Network) -> Vec<Finding> {
    if network.infiniband.is_empty() {
        return vec![new("infiniband", Status::Info, "no adapter").because(
            "between hosts, data goes over the interfaces above; within this host nothing is missing",
        )];
    }
    let ports = network.infiniband.iter().map(|port| {
        let parts = [&port.state, &port.rate, &port.link_layer].map(String::as_str);
        let firmware = (!port.firmware.is_empty()).then(|| format!("firmware {}", port.firmware));
        let known = parts.into_iter().chain(firmware.as_deref()).filter(|part| !part.is_empty());
        let seen = known.collect::<Vec<_>>().join(", ");
        if port.state == "ACTIVE" {
            return new("infiniband", Status::Ok, seen).of(&port.name);
        }
        new("infiniband", Status::Warning, seen)
            .of(&port.name)
            .because("an inactive port carries no data: no cable, no switch, or no subnet manager")
            .remedy("inspect it with ibstat; exclude it with NCCL_IB_HCA, such as ^mlx5_4")
    });
    ports.collect()
}

fn gpu_direct(network: &Network, gpus: usize) -> Option<Finding> {
    if network.infiniband.is_empty() || gpus == 0 {
        return None;
    }
    Some(if network.peer_memory_module {
        new("gpu_direct", Status::Ok, "nvidia_peermem is loaded: adapters access GPU memory directly")
    } else {
        new("gpu_direct", Status::Info, "nvidia_peermem is not loaded")
            .because("adapters use DMA-BUF instead where the kernel (5.12) and the driver (open modules) support it; \
                      otherwise data between hosts passes through host memory")
            .remedy("modprobe nvidia_peermem, unless NCCL_DEBUG=INFO shows `via NET/IB/…/GDRDMA` already")
    })
}
