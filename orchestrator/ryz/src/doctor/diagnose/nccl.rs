use ryzanstein_config::nccl::{NcclVariable, advice};

use super::environment::shown;
use crate::doctor::facts::Interface;
use crate::doctor::finding::{Finding, Status};

pub(super) fn diagnose(variables: &[NcclVariable], interfaces: &[Interface]) -> Vec<Finding> {
    if variables.is_empty() {
        return vec![Finding::new(
            "nccl",
            "variables",
            Status::Ok,
            "none are set: NCCL chooses everything itself",
        )];
    }
    variables.iter().map(|variable| one(variable, interfaces)).collect()
}

fn one(variable: &NcclVariable, interfaces: &[Interface]) -> Finding {
    let shown = |value| shown(&variable.name, value);
    let mut seen = format!("{} by {}", shown(&variable.value), variable.source);
    if let Some((value, source)) = &variable.overridden {
        seen = format!("{seen}, which overrides {} of {source}", shown(value));
    }
    let finding = |status| Finding::new("nccl", "variable", status, seen.clone()).of(&variable.name);
    if let Some(advice) = advice(&variable.name) {
        return finding(Status::Warning).because(advice.what).remedy(advice.instead);
    }
    if variable.name == "NCCL_SOCKET_IFNAME" && !names_any(&variable.value, interfaces) {
        return finding(Status::Warning)
            .because("this host has no such network interface: groups on NCCL do not start")
            .remedy("name one that `ip -brief address` shows, or unset it");
    }
    let slows = [
        (
            "NCCL_P2P_DISABLE",
            "1",
            "GPUs do not access each other's memory: NVLink is unused, and data passes through the host",
        ),
        (
            "NCCL_P2P_LEVEL",
            "LOC",
            "GPUs do not access each other's memory: NVLink is unused, and data passes through the host",
        ),
        ("NCCL_SHM_DISABLE", "1", "GPUs of one host without peer access communicate over the network"),
        (
            "NCCL_IB_DISABLE",
            "1",
            "data between hosts goes over TCP, even where there are InfiniBand adapters",
        ),
    ];
    if let Some((.., effect)) =
        slows.iter().find(|(name, value, _)| *name == variable.name && *value == variable.value)
    {
        return finding(Status::Info).because(*effect).remedy("unset it unless this is intended");
    }
    if variable.name == "NCCL_NVLS_ENABLE" && variable.value == "0" {
        return finding(Status::Info).because("NVLink multicast stays off; Ryzanstein does not turn it on");
    }
    finding(Status::Info)
}

/// Returns true if `NCCL_SOCKET_IFNAME` leaves an interface. It lists prefixes of names, or whole names after `=`; those after `^`
/// are left out.
fn names_any(value: &str, interfaces: &[Interface]) -> bool {
    let (names, is_whole) = value.strip_prefix('=').map_or((value, false), |names| (names, true));
    let fits = |interface: &Interface, name: &str| {
        if is_whole { interface.name == name } else { interface.name.starts_with(name) }
    };
    // A port may follow a name.
    let names = names.split(',').map(|name| name.split(':').next().unwrap_or(name));
    let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
    let is_named = |interface: &Interface| names.iter().any(|name| fits(interface, name));
    value.starts_with('^') || names.is_empty() || interfaces.iter().any(is_named)
}
