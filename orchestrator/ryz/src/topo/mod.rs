//! `ryz topo`: the links between the GPUs and network adapters of a machine. Pure, from the facts that the doctor probes.

mod preset;
mod sync_times;
mod text;

use ryzanstein_process_group::nvml::{Gpu, PairPath};
use serde::{Serialize, Serializer};

pub use preset::Preset;
pub use sync_times::SyncTimes;

use crate::doctor::{DriverFacts, Hardware, InfinibandPort, Interface, NumaNode, PciPlace, tensor_parallel};
use ryzanstein_orchestrator::plural;

/// The GPUs and adapters of a machine, and the path between each two of them.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Topology {
    /// The host.
    pub host: String,
    /// Name of the preset, if these are the invented facts of such a machine.
    pub preset: Option<String>,
    /// The devices: GPUs, then network adapters.
    pub devices: Vec<Device>,
    /// The path from each device to each, in the order of `devices`; `None` to itself.
    #[serde(serialize_with = "names")]
    pub matrix: Vec<Vec<Option<PairPath>>>,
    /// The NUMA nodes of the machine.
    pub numa_nodes: Vec<NumaNode>,
    /// The number of ranks that should share a layer, and the reason; `None` without GPUs.
    pub tensor_parallel: Option<String>,
    /// The reason why there are no GPUs, if there are none.
    pub no_gpus: Option<String>,
}

/// A GPU or a network adapter.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Device {
    /// Name of the device: `GPU0`, `NIC0` and so on.
    pub name: String,
    /// Description of the device, and the bandwidth of its links.
    pub description: String,
    /// PCI address of the device.
    pub pci: Option<String>,
    /// The NUMA node closest to the device, if there are several.
    pub numa_node: Option<u32>,
    /// The processors of that node.
    pub processors: Option<String>,
    #[serde(skip)]
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Gpu,
    Adapter,
}

/// Returns the name of a path in the matrix, as by `nvidia-smi topo -m`: `X` for the device itself, `NV18`, `PIX`, `SYS`.
fn name(path: Option<PairPath>) -> String {
    path.map_or_else(|| "X".into(), PairPath::short)
}

/// Returns the meaning of that name.
const fn meaning(path: PairPath) -> &'static str {
    match path {
        PairPath::Nvlink(_) => "this number of NVLinks",
        PairPath::Board => "one board",
        PairPath::Switch => "one PCIe switch",
        PairPath::Switches => "several PCIe switches",
        PairPath::HostBridge => "a PCIe host bridge: the processor",
        PairPath::Node => "PCIe host bridges of one NUMA node",
        PairPath::System => "the link between NUMA nodes",
        PairPath::Unknown => "not reported",
    }
}

fn names<S: Serializer>(matrix: &[Vec<Option<PairPath>>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(matrix.iter().map(|row| row.iter().copied().map(name).collect::<Vec<_>>()))
}

/// A device and its position.
struct Placed {
    /// Number of a GPU in NVML.
    gpu: Option<u32>,
    name: String,
    description: String,
    place: Option<PciPlace>,
}

impl Topology {
    /// Builds the topology from the probed facts of a machine.
    pub fn of(hardware: &Hardware) -> Self {
        let none = DriverFacts::default();
        let driver = hardware.driver.as_ref().unwrap_or(&none);
        let adapters = adapters(&hardware.network.interfaces, &hardware.network.infiniband);
        let placed: Vec<Placed> = gpus(driver).into_iter().chain(adapters).collect();
        let way = |(i, a): (usize, &Placed), (j, b): (usize, &Placed)| match (a.gpu, b.gpu) {
            _ if i == j => None,
            (Some(a), Some(b)) => Some(driver_path(driver, a, b)),
            _ => Some(match (&a.place, &b.place) {
                (Some(a), Some(b)) => pci_path(a, b),
                _ => PairPath::Unknown,
            }),
        };
        let matrix = placed
            .iter()
            .enumerate()
            .map(|row| placed.iter().enumerate().map(|column| way(row, column)).collect());
        let matrix = matrix.collect();
        let tensor_parallel = (!driver.gpus.is_empty()).then(|| tensor_parallel(driver).seen);
        let no_gpus = match &hardware.driver {
            Ok(driver) if driver.gpus.is_empty() => Some("the driver lists none".into()),
            Ok(_) => None,
            Err(why) => Some(why.clone()),
        };
        let devices = placed.into_iter().map(|placed| device(placed, &hardware.numa_nodes)).collect();
        Self {
            host: hardware.host.clone(),
            preset: None,
            devices,
            matrix,
            numa_nodes: hardware.numa_nodes.clone(),
            tensor_parallel,
            no_gpus,
        }
    }

    /// Returns the indices of the devices that have a column: the GPUs, or all if there are none. The path between two adapters
    /// carries little information, and eight of each would not fit a line.
    fn columns(&self) -> Vec<usize> {
        let gpus = |device: &Device| device.kind == Kind::Gpu;
        let any = self.devices.iter().any(gpus);
        (0..self.devices.len()).filter(|index| !any || gpus(&self.devices[*index])).collect()
    }

    /// Returns the heading: the host or the preset.
    fn heading(&self) -> String {
        match &self.preset {
            Some(preset) => format!("ryz topo, made-up machine `{preset}`"),
            None => format!("ryz topo on {}", self.host),
        }
    }

    /// Returns the names in the matrix with their meanings, each once, the best first.
    fn legend(&self) -> Vec<(String, &'static str)> {
        let mut ways: Vec<PairPath> =
            self.columns().iter().flat_map(|column| self.matrix[*column].iter().flatten().copied()).collect();
        ways.sort_unstable();
        ways.dedup();
        ways.into_iter().map(|path| (path.short(), meaning(path))).collect()
    }
}

fn gpus(driver: &DriverFacts) -> Vec<Placed> {
    let one = |gpu: &Gpu| {
        let each = gpu.nvlink_gbs.map_or_else(String::new, |gbs| format!(" of {gbs:.0} GB/s each way"));
        let links = if gpu.nvlinks > 0 {
            format!(", {}{each}", plural(gpu.nvlinks as usize, "NVLink"))
        } else {
            String::new()
        };
        Placed {
            gpu: Some(gpu.index),
            name: format!("GPU{}", gpu.index),
            description: format!("{}{links}", gpu.name),
            place: driver.places.get(&gpu.index).cloned(),
        }
    };
    driver.gpus.iter().map(one).collect()
}

/// Returns adapters on the PCI bus, each once, whether it is a port of InfiniBand, an interface, or both. Virtual interfaces
/// are left out: they have no position.
fn adapters(interfaces: &[Interface], ports: &[InfinibandPort]) -> Vec<Placed> {
    let mut all: Vec<(PciPlace, Vec<String>)> = Vec::new();
    let ports = ports.iter().filter_map(|port| {
        let rate = [&port.state, &port.rate, &port.link_layer].map(String::as_str);
        let rate: Vec<&str> = rate.into_iter().filter(|word| !word.is_empty()).collect();
        Some((port.pci.clone()?, format!("{} {}", port.name, rate.join(", "))))
    });
    let interfaces = interfaces.iter().filter_map(|interface| {
        Some((interface.pci.clone()?, format!("{} {}", interface.name, interface.rate())))
    });
    for (place, what) in ports.chain(interfaces) {
        match all.iter_mut().find(|(known, _)| *known == place) {
            Some((_, known)) => known.push(what),
            None => all.push((place, vec![what])),
        }
    }
    let one = |(index, (place, what)): (usize, (PciPlace, Vec<String>))| Placed {
        gpu: None,
        name: format!("NIC{index}"),
        description: what.join("; "),
        place: Some(place),
    };
    all.into_iter().enumerate().map(one).collect()
}

fn device(placed: Placed, nodes: &[NumaNode]) -> Device {
    // On a machine with a single node, the kernel reports no node.
    let only = if let [only] = nodes { Some(only.id) } else { None };
    let numa_node = placed.place.as_ref().and_then(|place| place.numa_node).or(only);
    let node = nodes.iter().find(|node| Some(node.id) == numa_node);
    Device {
        name: placed.name,
        description: placed.description,
        pci: placed.place.and_then(|place| place.path.into_iter().next_back()),
        numa_node,
        processors: node.map(|node| node.processors.clone()),
        kind: if placed.gpu.is_some() { Kind::Gpu } else { Kind::Adapter },
    }
}

/// Returns the driver's report of the path between two GPUs.
fn driver_path(driver: &DriverFacts, a: u32, b: u32) -> PairPath {
    let pair = driver.pairs.iter().find(|pair| (pair.a, pair.b) == (a.min(b), a.max(b)));
    pair.map_or(PairPath::Unknown, |pair| pair.path)
}

/// Returns the path between two devices on the PCI bus, as NVIDIA's tools name it.
fn pci_path(a: &PciPlace, b: &PciPlace) -> PairPath {
    let common = a.path.iter().zip(&b.path).take_while(|(a, b)| a == b).count();
    let below = a.path.len().max(b.path.len()) - common;
    match common {
        0 if a.numa_node == b.numa_node => PairPath::Node,
        0 => PairPath::System,
        1 => PairPath::HostBridge,
        // Below a switch there is a port of it, and the device.
        _ if below <= 2 => PairPath::Switch,
        _ => PairPath::Switches,
    }
}

#[cfg(test)]
mod tests;
