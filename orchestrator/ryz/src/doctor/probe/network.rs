use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use super::{names, pci};
use crate::doctor::facts::{InfinibandPort, Interface, Network};
use ryzanstein_benches::cgroup::read;

const INTERFACES: &str = "/sys/class/net";
const ADAPTERS: &str = "/sys/class/infiniband";
/// Timeout of a connection over loopback.
const DEADLINE: Duration = Duration::from_secs(2);

pub(super) fn probe() -> Network {
    Network {
        interfaces: interfaces(),
        loopback: loopback().map_err(|error| error.to_string()),
        infiniband: infiniband(Path::new(ADAPTERS)),
        peer_memory_module: ["nvidia_peermem", "nv_peer_mem"]
            .iter()
            .any(|module| Path::new("/sys/module").join(module).is_dir()),
    }
}

fn interfaces() -> Vec<Interface> {
    let mut addresses: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for interface in if_addrs::get_if_addrs().unwrap_or_default() {
        addresses.entry(interface.name.clone()).or_default().push(interface.ip());
    }
    let one = |name: String| {
        let folder = Path::new(INTERFACES).join(&name);
        let addresses = addresses.get(&name).cloned().unwrap_or_default();
        Interface {
            // Interfaces of unknown speed report -1, or nothing.
            speed: read(folder.join("speed")).and_then(|text| text.parse().ok()).filter(|speed| *speed > 0),
            state: read(folder.join("operstate")).unwrap_or_default(),
            loopback: addresses.iter().any(std::net::IpAddr::is_loopback) || name == "lo",
            pci: pci::place(folder.join("device")),
            addresses,
            name,
        }
    };
    names(INTERFACES).into_iter().map(one).collect()
}

/// Sends a few bytes over 127.0.0.1 and reads them back.
fn loopback() -> std::io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut near = TcpStream::connect_timeout(&listener.local_addr()?, DEADLINE)?;
    let (mut far, _) = listener.accept()?;
    far.set_read_timeout(Some(DEADLINE))?;
    near.write_all(b"ping")?;
    let mut bytes = [0; 4];
    far.read_exact(&mut bytes)?;
    if bytes == *b"ping" {
        Ok(())
    } else {
        Err(std::io::Error::other("the bytes received differ from those sent"))
    }
}

/// Reads the adapters that this folder describes.
fn infiniband(adapters: &Path) -> Vec<InfinibandPort> {
    let mut all = Vec::new();
    for adapter in names(adapters) {
        let folder = adapters.join(&adapter);
        let ports = folder.join("ports");
        for port in names(&ports) {
            let text = |file: &str| read(ports.join(&port).join(file)).unwrap_or_default();
            // `4: ACTIVE`
            let state = text("state");
            all.push(InfinibandPort {
                name: format!("{adapter}:{port}"),
                state: state.split_once(": ").map_or(state.as_str(), |(_, state)| state).to_owned(),
                rate: text("rate"),
                link_layer: text("link_layer"),
                firmware: read(folder.join("fw_ver")).unwrap_or_default(),
                pci: pci::place(folder.join("device")),
                roce_v2_gid: roce_v2_gid(&ports.join(&port)),
            });
        }
    }
    all
}

/// Returns the index of the entry of RoCE v2 with an IPv4 address in the table of the port that this folder describes.
fn roce_v2_gid(port: &Path) -> Option<u32> {
    let mut entries: Vec<u32> =
        names(port.join("gids")).iter().filter_map(|name| name.parse().ok()).collect();
    entries.sort_unstable();
    entries.into_iter().find(|entry| {
        let text = |folder: &str| read(port.join(folder).join(entry.to_string())).unwrap_or_default();
        // An IPv4 address is at the end of an IPv6 one.
        text("gid_attrs/types") == "RoCE v2" && text("gids").starts_with("0000:0000:0000:0000:0000:ffff:")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ports_of_adapters_are_read_from_the_kernel() {
        let adapters = tempfile::tempdir().expect("a folder");
        assert!(infiniband(adapters.path()).is_empty());
        let write = |file: &str, text: &str| {
            let file = adapters.path().join(file);
            std::fs::create_dir_all(file.parent().expect("a folder")).expect("made");
            std::fs::write(file, text).expect("written");
        };
        write("mlx5_0/fw_ver", "28.39.1002\n");
        write("mlx5_0/ports/1/state", "4: ACTIVE\n");
        write("mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n");
        write("mlx5_0/ports/1/link_layer", "InfiniBand\n");
        write("mlx5_1/ports/1/state", "1: DOWN\n");
        let ports = infiniband(adapters.path());
        let seen: Vec<_> = ports.iter().map(|p| (p.name.as_str(), p.state.as_str())).collect();
        assert_eq!(seen, [("mlx5_0:1", "ACTIVE"), ("mlx5_1:1", "DOWN")]);
        let first = (ports[0].rate.as_str(), ports[0].link_layer.as_str(), ports[0].firmware.as_str());
        assert_eq!(first, ("400 Gb/sec (4X NDR)", "InfiniBand", "28.39.1002"));
    }

    #[test]
    fn the_entry_of_roce_v2_is_the_first_with_an_ipv4_address() {
        let port = tempfile::tempdir().expect("a folder");
        std::fs::create_dir_all(port.path().join("gids")).expect("made");
        std::fs::create_dir_all(port.path().join("gid_attrs/types")).expect("made");
        let local = "fe80:0000:0000:0000:0000:00ff:fe00:0001";
        let mapped = "0000:0000:0000:0000:0000:ffff:0a00:0001";
        let table = [
            (0, "IB/RoCE v1", local),
            (1, "RoCE v2", local),
            (2, "IB/RoCE v1", mapped),
            (3, "RoCE v2", mapped),
        ];
        assert_eq!(roce_v2_gid(port.path()), None);
        for (entry, kind, gid) in table {
            std::fs::write(port.path().join(format!("gids/{entry}")), format!("{gid}\n")).expect("written");
            std::fs::write(port.path().join(format!("gid_attrs/types/{entry}")), format!("{kind}\n"))
                .expect("written");
        }
        assert_eq!(roce_v2_gid(port.path()), Some(3));
    }
}
