//! The address at which a rank listens for links of the other ranks.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ryzanstein_config::Config;

use crate::error::{Error, Result};
use crate::link::mesh::Bound;
use crate::membership::rendezvous::Rendezvous;

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
    let all =
        if_addrs::get_if_addrs().map_err(Error::system("cannot list this host's network interfaces"))?;
    let mut found: Vec<_> = all.iter().filter(|i| i.name == interface).map(if_addrs::Interface::ip).collect();
    found.sort_by_key(IpAddr::is_ipv6);
    found.into_iter().next().ok_or_else(|| {
        // An interface is listed once for each of its addresses, and not always consecutively.
        let names: BTreeSet<_> = all.iter().map(|i| i.name.as_str()).collect();
        let names: Vec<_> = names.into_iter().collect();
        Error::Configuration(format!(
            "process_group.tcp.interface: this host has no interface `{interface}` with an address; it has {}",
            names.join(", ")
        ))
    })
}
