use std::path::Path;

use super::names;
use crate::doctor::facts::{NumaNode, PciPlace};
use ryzanstein_benches::cgroup::read;

const NODES: &str = "/sys/devices/system/node";

/// Returns the position of the device behind this link of `/sys`; `None` if it is not on the PCI bus.
pub(super) fn place(device: impl AsRef<Path>) -> Option<PciPlace> {
    let folder = device.as_ref().canonicalize().ok()?;
    let path = path(folder.to_str()?);
    // The last component may be a device of another bus that an adapter on the PCI bus carries, such as virtio's.
    let adapter = path.last()?;
    let folder = folder.ancestors().find(|folder| folder.ends_with(adapter))?;
    // -1 on machines with a single node.
    let numa_node = read(folder.join("numa_node")).and_then(|text| text.parse().ok());
    Some(PciPlace { path, numa_node })
}

/// Returns the host bridge and the PCI addresses in a path of `/sys`; empty if there is no address.
fn path(folder: &str) -> Vec<String> {
    // `0000:1b:00.0`
    let is_address = |name: &str| {
        let hex = |text: &str| text.chars().all(|c| c.is_ascii_hexdigit());
        let parts: Vec<&str> = name.split([':', '.']).collect();
        matches!(parts[..], [domain, bus, slot, function]
            if domain.len() >= 4 && bus.len() == 2 && slot.len() == 2 && function.len() == 1)
            && parts.iter().all(|part| hex(part))
    };
    let names = || folder.split('/').filter(|name| is_address(name));
    let bridge = folder.split('/').find(|name| name.starts_with("pci") && name.contains(':'));
    match bridge {
        Some(bridge) if names().next().is_some() => {
            [bridge].into_iter().chain(names()).map(str::to_owned).collect()
        }
        _ => Vec::new(),
    }
}

pub(super) fn numa_nodes() -> Vec<NumaNode> {
    let node = |name: String| {
        let id = name.strip_prefix("node")?.parse().ok()?;
        Some(NumaNode { id, processors: read(Path::new(NODES).join(&name).join("cpulist"))? })
    };
    let mut nodes: Vec<NumaNode> = names(NODES).into_iter().filter_map(node).collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bridges_and_the_adapter_are_found_in_the_path_of_a_device() {
        assert_eq!(
            path("/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/net/ens1np0"),
            ["pci0000:15", "0000:15:01.0", "0000:16:00.0"]
        );
        assert_eq!(path("/sys/devices/pci0000:00/0000:00:03.0/virtio2"), ["pci0000:00", "0000:00:03.0"]);
        assert!(path("/sys/devices/virtual/net/lo").is_empty());
        assert!(path("/sys/devices/pci0000:00").is_empty());
    }
}
