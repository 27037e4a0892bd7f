//! The results of the probes: plain data, so that the diagnosis is tested without a machine.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use ryzanstein_config::BackendChoice;
use ryzanstein_config::InstructionSet;
use ryzanstein_config::nccl::NcclVariable;
use ryzanstein_process_group::nvml::{Gpu, Pair, PairPath};
use serde::{Deserialize, Serialize};

/// All known facts about this machine and its configuration.
#[derive(Debug)]
pub struct Facts {
    /// The machine.
    pub host: Host,
    /// The networks of the machine.
    pub network: Network,
    /// The programs and libraries for fast networks.
    pub fabric: Fabric,
    /// The GPUs of the machine.
    pub gpu: GpuFacts,
    /// The libraries that drive the GPUs.
    pub libraries: Vec<Library>,
    /// NCCL's variables, with their sources.
    pub nccl: Vec<NcclVariable>,
    /// The variables of CUDA and UCX in the environment, with their values.
    pub variables: Vec<(String, String)>,
    /// The backend that the settings request.
    pub backend: BackendChoice,
    /// The trial groups.
    pub trials: Vec<Trial>,
}

/// The links between the parts of this machine, as `ryz topo` shows them. Finding them makes no trial and starts no process.
#[derive(Debug)]
pub struct Hardware {
    /// The name of the host.
    pub host: String,
    /// The driver's report, or the reason why the driver cannot be queried.
    pub driver: Result<DriverFacts, String>,
    /// The networks.
    pub network: Network,
    /// The NUMA nodes.
    pub numa_nodes: Vec<NumaNode>,
}

/// Processors that are near the same memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// The kernel's number of the node.
    pub id: u32,
    /// Its processors, in the format of the kernel: `0-55,112-167`.
    pub processors: String,
}

/// The position of a device on the PCI bus.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciPlace {
    /// The host bridge, every bridge below it, and the device: `pci0000:00`, `0000:00:01.0`, `0000:01:00.0`.
    pub path: Vec<String>,
    /// The NUMA node closest to the device, if there are several.
    pub numa_node: Option<u32>,
}

/// The machine.
#[derive(Debug)]
pub struct Host {
    /// Operating system, kernel, architecture.
    pub system: String,
    /// Number of CPUs that this process may run on.
    pub processors: usize,
    /// The instruction sets for matrix products, the fastest first.
    pub instruction_sets: Vec<InstructionSet>,
    /// The instruction set that `model.instruction_set` requests.
    pub asked_instruction_set: Option<InstructionSet>,
    /// Number of CPUs of the machine.
    pub processors_online: usize,
    /// Mean number of threads that ran or waited for a CPU in the last minute.
    pub load: Option<f64>,
    /// The cgroup's CPU quota, in CPUs.
    pub processor_quota: Option<f64>,
    /// Total memory, in bytes.
    pub memory: u64,
    /// Available memory, in bytes.
    pub memory_available: u64,
    /// The cgroup's memory limit, in bytes.
    pub memory_limit: Option<u64>,
    /// The size of `/dev/shm` and the free space in it, in bytes.
    pub shared_memory: Option<(u64, u64)>,
    /// The limit on locked memory, in bytes; `None` without limit.
    pub locked_memory: Option<u64>,
    /// The soft and hard limits on open files; `None` without limit.
    pub open_files: (Option<u64>, Option<u64>),
    /// The folder for secrets and scratch files.
    pub temporary: TemporaryFolder,
}

/// The folder for secrets and scratch files.
#[derive(Debug)]
pub struct TemporaryFolder {
    /// Path of the folder.
    pub path: PathBuf,
    /// `Ok` if files can be created there; otherwise the reason why not.
    pub writable: Result<(), String>,
}

/// The networks of the machine.
#[derive(Debug)]
pub struct Network {
    /// The interfaces.
    pub interfaces: Vec<Interface>,
    /// `Ok` if a TCP connection over 127.0.0.1 carries bytes; otherwise the reason why not.
    pub loopback: Result<(), String>,
    /// Ports of InfiniBand and RoCE adapters.
    pub infiniband: Vec<InfinibandPort>,
    /// True if the kernel module for GPUDirect RDMA is loaded.
    pub peer_memory_module: bool,
}

/// A network interface.
#[derive(Clone, Debug, Default)]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// Addresses of the interface.
    pub addresses: Vec<IpAddr>,
    /// Speed in Mb/s, if known.
    pub speed: Option<u32>,
    /// True if it is a loopback interface.
    pub loopback: bool,
    /// State from the kernel: `up`, `down` or `unknown`.
    pub state: String,
    /// Position of its adapter; `None` for a virtual interface.
    pub pci: Option<PciPlace>,
}

impl Interface {
    /// Formats the speed for people.
    pub(crate) fn rate(&self) -> String {
        match self.speed {
            Some(speed) if speed >= 1000 => format!("{} Gb/s", f64::from(speed) / 1000.0),
            Some(speed) => format!("{speed} Mb/s"),
            None => "(speed unknown)".into(),
        }
    }
}

/// A port of an InfiniBand or RoCE adapter.
#[derive(Clone, Debug, Default)]
pub struct InfinibandPort {
    /// The adapter and the port, such as `mlx5_0:1`.
    pub name: String,
    /// State of the port, such as `ACTIVE`.
    pub state: String,
    /// Rate of the port, such as `400 Gb/sec (4X NDR)`.
    pub rate: String,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: String,
    /// The first entry of the port's table of global identifiers that is of RoCE v2 with an IPv4 address.
    pub roce_v2_gid: Option<u32>,
    /// Version of the adapter's firmware; empty if unknown.
    pub firmware: String,
    /// Position of the adapter.
    pub pci: Option<PciPlace>,
}

/// The programs and libraries for InfiniBand and RoCE that are installed.
#[derive(Debug, Default)]
pub struct Fabric {
    /// The ports that `ibv_devinfo` lists, or its error; `None` if it is not installed.
    pub verbs: Option<Result<Vec<VerbsPort>, String>>,
    /// The file of `ib_write_bw`.
    pub write_bandwidth: Option<PathBuf>,
    /// The version and the file of `ucx_info`, or its error; `None` if it is not installed.
    pub ucx: Option<Result<String, String>>,
    /// The file of SHARP's library.
    pub sharp: Option<PathBuf>,
    /// The file of a network plugin of NCCL, which SHARP needs.
    pub nccl_plugin: Option<PathBuf>,
}

/// A port that programs can open, as `ibv_devinfo` lists it.
#[derive(Clone, Debug, Default)]
pub struct VerbsPort {
    /// The adapter and the port, such as `mlx5_0:1`.
    pub name: String,
    /// Largest payload of a packet in use, in bytes.
    pub active_mtu: Option<u32>,
    /// Largest payload of a packet that the port supports, in bytes.
    pub max_mtu: Option<u32>,
}

/// The facts about GPUs.
#[derive(Debug)]
pub struct GpuFacts {
    /// The number of NVIDIA GPUs on the PCI bus, with or without a driver.
    pub on_bus: usize,
    /// The version of the driver's kernel module, if it is loaded.
    pub module: Option<String>,
    /// The driver's report, or the reason why the driver cannot be queried.
    pub driver: Result<DriverFacts, String>,
    /// Value of `CUDA_VISIBLE_DEVICES`, if it is set.
    pub visible: Option<String>,
    /// The GPUs that CUDA shows, in its order, or the reason why CUDA cannot be queried.
    pub shown: Result<Vec<VisibleGpu>, String>,
}

impl GpuFacts {
    /// Returns true if a job may use this GPU. All count if CUDA cannot be queried.
    pub fn is_shown(&self, gpu: &Gpu) -> bool {
        self.shown.as_ref().map_or(true, |shown| shown.iter().any(|one| one.is(gpu)))
    }

    /// Returns the driver's report about the GPUs that a job may use.
    pub fn usable(&self) -> DriverFacts {
        let mut side = self.driver.as_ref().ok().cloned().unwrap_or_default();
        side.gpus.retain(|gpu| self.is_shown(gpu));
        let has = |index| side.gpus.iter().any(|gpu| gpu.index == index);
        side.pairs.retain(|pair| has(pair.a) && has(pair.b));
        side
    }
}

/// A GPU that CUDA shows, with the identifiers that NVML reports too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VisibleGpu {
    /// UUID of the GPU; that of the instance under MIG.
    pub uuid: String,
    /// PCI address of the GPU.
    pub pci: String,
}

impl VisibleGpu {
    /// Compares UUIDs, then PCI addresses: under MIG, CUDA reports the UUID of an instance. NVML pads addresses with zeros.
    fn is(&self, gpu: &Gpu) -> bool {
        let address = |pci: &str| pci.trim_start_matches('0').to_lowercase();
        self.uuid == gpu.uuid || (!self.pci.is_empty() && address(&self.pci) == address(&gpu.pci))
    }
}

/// The driver's report.
#[derive(Clone, Debug, Default)]
pub struct DriverFacts {
    /// Version of the driver.
    pub version: String,
    /// The newest CUDA version that the driver supports.
    pub cuda: Option<(i32, i32)>,
    /// The GPUs.
    pub gpus: Vec<Gpu>,
    /// The connection of each pair of GPUs.
    pub pairs: Vec<Pair>,
    /// Positions of the GPUs on the PCI bus, by their numbers in NVML; those that the kernel does not show are left out.
    pub places: BTreeMap<u32, PciPlace>,
}

impl DriverFacts {
    /// Returns true if there are several GPUs and NVLink connects every two of them.
    pub fn is_all_nvlink(&self) -> bool {
        !self.pairs.is_empty() && self.pairs.iter().all(|pair| matches!(pair.path, PairPath::Nvlink(_)))
    }
}

/// A library that is loaded at run time.
#[derive(Debug)]
pub struct Library {
    /// Name of the library in findings: `cuda_driver`, `nccl`, `nvrtc`, `cublaslt`.
    pub name: &'static str,
    /// The purpose of the library.
    pub needed_for: &'static str,
    /// Its version and its file, or every place that was searched.
    pub found: Result<String, String>,
}

/// A trial group and its all-reduce.
#[derive(Debug)]
pub struct Trial {
    /// Name of the trial: `all_reduce_tcp` or `all_reduce_gpu`.
    pub name: &'static str,
    /// The number of ranks.
    pub ranks: usize,
    /// The outcome, or the error.
    pub outcome: Result<TrialOutcome, String>,
}

/// A group that started and computed the right values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrialOutcome {
    /// The backend that was selected.
    pub backend: String,
    /// The reason for this backend.
    pub reason: String,
    /// Time until the group was ready, self-check included, in milliseconds.
    pub ready_ms: f64,
    /// For each path, the conditions under which calls take it, or the reasons why they do not take it although they might
    /// have.
    pub paths: Vec<(String, String)>,
    /// The median of an all-reduce of 100 KB, in microseconds; `None` where only the group's self-check ran.
    pub median_us: Option<f64>,
}
