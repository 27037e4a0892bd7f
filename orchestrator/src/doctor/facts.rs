//! What the probes bring: plain data, so that what is concluded from it is tested without a machine.

use std::net::IpAddr;
use std::path::PathBuf;

use ryzanstein_config::BackendChoice;
use ryzanstein_config::nccl::NcclVariable;
use ryzanstein_process_group::nvml::{Gpu, Pair};
use serde::{Deserialize, Serialize};

/// All that is known of this machine and of what it is to do.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The machine.
    pub host: Host,
    /// Its networks.
    pub network: Network,
    /// Its GPUs.
    pub gpu: GpuFacts,
    /// The libraries that drive them.
    pub libraries: Vec<Library>,
    /// NCCL's variables, with who set them.
    pub nccl: Vec<NcclVariable>,
    /// The backend that the settings ask for.
    pub backend: BackendChoice,
    /// What came of trying.
    pub trials: Vec<Trial>,
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Host {
    /// Operating system, kernel, architecture.
    pub system: String,
    /// Processors that this process may run on.
    pub processors: usize,
    /// How many processors' time the cgroup gives.
    pub processor_quota: Option<f64>,
    /// All memory, in bytes.
    pub memory: u64,
    /// What of it can be had, in bytes.
    pub memory_available: u64,
    /// What the cgroup allows, in bytes.
    pub memory_limit: Option<u64>,
    /// The size of `/dev/shm` and what is free there, in bytes.
    pub shared_memory: Option<(u64, u64)>,
    /// How much memory may be locked, in bytes; none without limit.
    pub locked_memory: Option<u64>,
    /// How many files may be open: now, and at most; none without limit.
    pub open_files: (Option<u64>, Option<u64>),
    /// The folder for secrets and scratch files, and why nothing can be written there.
    pub temporary: (PathBuf, Result<(), String>),
    /// `kernel.yama.ptrace_scope`; none where the kernel has no Yama.
    pub ptrace_scope: Option<u32>,
    /// Whether a process may read the memory of another of the same user; else why not.
    pub peer_memory: Result<(), String>,
}

/// The networks of the machine.
#[derive(Clone, Debug)]
pub struct Network {
    /// The interfaces.
    pub interfaces: Vec<Interface>,
    /// Whether a connection to this machine's own loopback address carries bytes; else why not.
    pub loopback: Result<(), String>,
    /// Ports of InfiniBand and RoCE adapters.
    pub infiniband: Vec<InfinibandPort>,
    /// Whether the kernel module that gives adapters access to GPU memory is loaded.
    pub peer_memory_module: bool,
}

/// A network interface.
#[derive(Clone, Debug, Default)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Mb/s, if it tells.
    pub speed: Option<u32>,
    /// Whether it is the loopback.
    pub loopback: bool,
    /// `up`, `down` or `unknown`, as the kernel has it.
    pub state: String,
}

/// A port of an InfiniBand or RoCE adapter.
#[derive(Clone, Debug, Default)]
pub struct InfinibandPort {
    /// The adapter and the port, such as `mlx5_0:1`.
    pub name: String,
    /// Its state, such as `ACTIVE`.
    pub state: String,
    /// Its rate, such as `400 Gb/sec (4X NDR)`.
    pub rate: String,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: String,
}

/// What is known of GPUs.
#[derive(Clone, Debug)]
pub struct GpuFacts {
    /// NVIDIA's GPUs on the PCI bus, whether or not a driver is there.
    pub on_bus: usize,
    /// The version of the driver's kernel module, if it is loaded.
    pub module: Option<String>,
    /// What the driver says, or why it cannot be asked.
    pub driver: Result<DriverFacts, String>,
    /// `CUDA_VISIBLE_DEVICES`, if it is set.
    pub visible: Option<String>,
    /// The GPUs that CUDA shows, in its order; else why it cannot be asked.
    pub shown: Result<Vec<VisibleGpu>, String>,
}

impl GpuFacts {
    /// Whether a job may use this GPU. All count where CUDA cannot be asked.
    pub fn is_shown(&self, gpu: &Gpu) -> bool {
        self.shown.as_ref().map_or(true, |shown| shown.iter().any(|one| one.is(gpu)))
    }

    /// What the driver says of the GPUs that a job may use.
    pub fn usable(&self) -> DriverFacts {
        let mut side = self.driver.clone().unwrap_or_default();
        side.gpus.retain(|gpu| self.is_shown(gpu));
        let has = |index| side.gpus.iter().any(|gpu| gpu.index == index);
        side.pairs.retain(|pair| has(pair.a) && has(pair.b));
        side
    }
}

/// A GPU that CUDA shows, by what NVML knows it by too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VisibleGpu {
    /// Its name in the whole world; that of the instance where MIG cuts it.
    pub uuid: String,
    /// Its place on the PCI bus.
    pub pci: String,
}

impl VisibleGpu {
    /// By the name, or by the place, which NVML writes with more zeros: where MIG is on, CUDA has the name of an instance.
    fn is(&self, gpu: &Gpu) -> bool {
        let place = |pci: &str| pci.trim_start_matches('0').to_lowercase();
        self.uuid == gpu.uuid || (!self.pci.is_empty() && place(&self.pci) == place(&gpu.pci))
    }
}

/// What the driver says.
#[derive(Clone, Debug, Default)]
pub struct DriverFacts {
    /// Its version.
    pub version: String,
    /// The newest CUDA that it runs.
    pub cuda: Option<(i32, i32)>,
    /// The GPUs.
    pub gpus: Vec<Gpu>,
    /// How each two reach each other.
    pub pairs: Vec<Pair>,
}

/// A library that is opened at run time.
#[derive(Clone, Debug)]
pub struct Library {
    /// What it is called in findings: `cuda_driver`, `nccl`, `nvrtc`, `cublaslt`.
    pub name: &'static str,
    /// What it is needed for.
    pub needed_for: &'static str,
    /// Version, file and how it was found; else everywhere that was looked.
    pub found: Result<(String, String), String>,
}

/// A group that was made, and an all-reduce of it.
#[derive(Clone, Debug)]
pub struct Trial {
    /// What was to be tried: `all_reduce_tcp` or `all_reduce_gpu`.
    pub name: &'static str,
    /// How many ranks.
    pub ranks: usize,
    /// What came of it, or what went wrong.
    pub outcome: Result<TrialOutcome, String>,
}

/// A group that came up and computed what it should.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrialOutcome {
    /// The backend that was agreed on.
    pub backend: String,
    /// Why that one.
    pub reason: String,
    /// How long it took until the group was ready and had proved itself, in milliseconds.
    pub ready_ms: f64,
    /// The median of an all-reduce of 100 KB, in microseconds; none where only the group's own check was run.
    pub median_us: Option<f64>,
}
