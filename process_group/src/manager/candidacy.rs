//! What a rank says of itself before it joins: where it listens, and what it can use.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ryzanstein_config::Config;

use crate::error::{Error, Result};
use crate::mesh::Bound;
use crate::rendezvous::Rendezvous;
use crate::roster::{BackendKind, Capability};

pub(super) fn listen(config: &Config, rendezvous: &dyn Rendezvous) -> Result<Bound> {
    let tcp = &config.process_group.tcp;
    let address = match (tcp.bind, &tcp.interface) {
        (Some(address), _) => address,
        (None, Some(name)) => address_of(name)?,
        (None, None) => rendezvous.local_address()?,
    };
    Bound::new(address)
}

fn address_of(interface: &str) -> Result<IpAddr> {
    let all = if_addrs::get_if_addrs()
        .map_err(|e| Error::Configuration(format!("cannot list this host's network interfaces: {e}")))?;
    let mut found: Vec<_> = all.iter().filter(|i| i.name == interface).map(if_addrs::Interface::ip).collect();
    found.sort_by_key(IpAddr::is_ipv6);
    found.into_iter().next().ok_or_else(|| {
        // An interface is listed once for each of its addresses, and not next to itself.
        let names: BTreeSet<_> = all.iter().map(|i| i.name.as_str()).collect();
        let names: Vec<_> = names.into_iter().collect();
        Error::Configuration(format!(
            "process_group.tcp.interface: this host has no interface `{interface}` with an address; it has {}",
            names.join(", ")
        ))
    })
}

pub(super) fn capabilities(
    bound: Option<&Result<Bound>>,
    rendezvous: &dyn Rendezvous,
    no_nccl: Option<&String>,
) -> Vec<Capability> {
    let tcp = match bound {
        Some(Ok(_)) => None,
        Some(Err(error)) => Some(error.to_string()),
        None => Some("another backend was asked for".into()),
    };
    let loopback = match rendezvous.loopback() {
        Some(_) => None,
        None => Some("ranks are processes of their own and share no memory".into()),
    };
    vec![
        Capability { backend: BackendKind::Nccl, obstacle: no_nccl.cloned() },
        Capability { backend: BackendKind::Loopback, obstacle: loopback },
        Capability { backend: BackendKind::Tcp, obstacle: tcp },
    ]
}
