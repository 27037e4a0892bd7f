//! Information from NVML, the driver's management library, about the GPUs of this host.
//!
//! This module only reads: it changes no setting of a GPU, and makes no CUDA context. The library is opened at run time; on a
//! machine without it, the error lists the searched locations.

mod health;

use std::collections::BTreeMap;
use std::ffi::OsStr;

use nvml_wrapper::Device;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{
    ComputeMode, EccCounter, MemoryError, P2pCapabilitiesIndex, P2pStatus, TemperatureSensor,
    TemperatureThreshold, TopologyLevel,
};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::structs::device::FieldId;
use serde::Serialize;

pub use health::{GpuHealth, GpuSample};

/// Locations of the library: its name for the loader, and its path in containers.
const PLACES: [&str; 3] =
    ["libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1"];
/// The common speed of all NVLinks of a GPU, in MB/s of each direction: `NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON`.
const LINK_SPEED: FieldId = FieldId(90);
/// Maximum number of NVLinks of a GPU.
const MOST_LINKS: u32 = 18;

/// The library, opened and initialized.
pub struct Nvml {
    inner: nvml_wrapper::Nvml,
    place: &'static str,
}

/// The reason why NVML cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    /// It could not be opened at any location.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NotFound(Vec<NvmlPlace>),
    /// It could not count the GPUs.
    #[error("counting the GPUs: {0}")]
    Count(#[source] nvml_wrapper::error::NvmlError),
    /// It could not open a GPU.
    #[error("GPU {index}: {source}")]
    Gpu {
        /// NVML's number of the GPU.
        index: u32,
        /// The error of NVML.
        source: nvml_wrapper::error::NvmlError,
    },
}

/// A location where NVML was searched for, and the error there.
#[derive(Debug)]
pub struct NvmlPlace {
    /// The file, or the name that the loader was asked for.
    pub path: &'static str,
    /// The error.
    pub error: nvml_wrapper::error::NvmlError,
}

impl std::fmt::Display for NvmlPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.error {
            nvml_wrapper::error::NvmlError::LibloadingError(_) => write!(f, "{}: not there", self.path),
            error => write!(f, "{}: {error}", self.path),
        }
    }
}

/// A GPU. Values that it does not report are none.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Gpu {
    /// Its number in NVML, which follows the order of the PCI bus and ignores `CUDA_VISIBLE_DEVICES`.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its globally unique identifier.
    pub uuid: String,
    /// Its PCI address.
    pub pci: String,
    /// The compute capability.
    pub compute_capability: Option<(i32, i32)>,
    /// Total memory, in bytes.
    pub memory_bytes: u64,
    /// Memory in use by all processes, in bytes.
    pub memory_used_bytes: u64,
    /// True if ECC protects the memory.
    pub ecc: Option<bool>,
    /// Errors since the driver was loaded that ECC corrected.
    pub ecc_corrected: Option<u64>,
    /// Errors since the driver was loaded that ECC could not correct.
    pub ecc_uncorrected: Option<u64>,
    /// Temperature in degrees Celsius.
    pub temperature: Option<u32>,
    /// Temperature, in degrees Celsius, from which the GPU slows itself down.
    pub slowdown_temperature: Option<u32>,
    /// Reasons that reduce the clocks at present.
    pub throttled_by: Vec<String>,
    /// True if it is divided into several GPUs.
    pub mig: Option<bool>,
    /// True if contexts are forbidden on it.
    pub prohibited: bool,
    /// Number of active NVLinks.
    pub nvlinks: u32,
    /// Number of inactive NVLinks.
    pub nvlinks_down: u32,
    /// Bandwidth of one NVLink in each direction, in GB/s.
    pub nvlink_gbs: Option<f64>,
}

/// The connection of two GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// NVML's number of the first GPU.
    pub a: u32,
    /// NVML's number of the second GPU.
    pub b: u32,
    /// The path between them.
    pub path: PairPath,
    /// Access of each GPU to the other's memory.
    pub peer_access: PeerAccess,
    /// Bandwidth of the NVLinks between them in each direction, in GB/s.
    pub nvlink_gbs: Option<f64>,
}

/// The path between two GPUs, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PairPath {
    /// This number of NVLinks, direct or through switches.
    Nvlink(u32),
    /// Both are on one board.
    Board,
    /// Through one PCI switch.
    Switch,
    /// Through several PCI switches.
    Switches,
    /// Through a PCI host bridge: the processor.
    HostBridge,
    /// Through several host bridges of one NUMA node.
    Node,
    /// From one NUMA node to another.
    System,
    /// The driver does not report it.
    Unknown,
}

impl PairPath {
    /// Returns the abbreviation of `nvidia-smi topo -m`: `NV18`, `PIX`, `SYS`.
    pub fn short(self) -> String {
        match self {
            Self::Nvlink(links) => format!("NV{links}"),
            Self::Board => "BRD".into(),
            Self::Switch => "PIX".into(),
            Self::Switches => "PXB".into(),
            Self::HostBridge => "PHB".into(),
            Self::Node => "NODE".into(),
            Self::System => "SYS".into(),
            Self::Unknown => "?".into(),
        }
    }
}

/// Access of two GPUs to each other's memory, according to the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerAccess {
    /// They can use it.
    Yes,
    /// They cannot use it, for this reason.
    No(String),
}

impl Nvml {
    /// Opens the library.
    ///
    /// # Errors
    /// [`NvmlError::NotFound`].
    pub fn open() -> Result<Self, NvmlError> {
        let mut looked = Vec::new();
        for path in PLACES {
            match nvml_wrapper::Nvml::builder().lib_path(OsStr::new(path)).init() {
                Ok(inner) => return Ok(Self { inner, place: path }),
                Err(error) => looked.push(NvmlPlace { path, error }),
            }
        }
        Err(NvmlError::NotFound(looked))
    }

    /// Returns the location of the library.
    pub fn place(&self) -> &'static str {
        self.place
    }

    /// Returns the version of the driver, such as `580.82.07`; empty if it is not reported.
    pub fn driver_version(&self) -> String {
        self.inner.sys_driver_version().unwrap_or_default()
    }

    /// Returns the newest CUDA version that the driver supports: major, minor.
    pub fn cuda_version(&self) -> Option<(i32, i32)> {
        let number = self.inner.sys_cuda_driver_version().ok()?;
        Some((number / 1000, number % 1000 / 10))
    }

    /// Returns every GPU of the host, regardless of `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// The error of NVML when it cannot count the GPUs, or cannot open one.
    pub fn gpus(&self) -> Result<Vec<Gpu>, NvmlError> {
        let count = self.inner.device_count().map_err(NvmlError::Count)?;
        (0..count)
            .map(|index| {
                let device =
                    self.inner.device_by_index(index).map_err(|source| NvmlError::Gpu { index, source })?;
                Ok(look_at(index, &device))
            })
            .collect()
    }

    /// Returns the GPU with this UUID, if the host has it.
    pub fn gpu(&self, uuid: &str) -> Option<Gpu> {
        let device = self.inner.device_by_uuid(uuid).ok()?;
        Some(look_at(device.index().ok()?, &device))
    }

    /// Returns the connection of each pair of GPUs; pairs that NVML does not report are left out.
    pub fn pairs(&self) -> Vec<Pair> {
        let count = self.inner.device_count().unwrap_or(0);
        let devices: Vec<(u32, Device<'_>)> =
            (0..count).filter_map(|index| Some((index, self.inner.device_by_index(index).ok()?))).collect();
        let mut pairs = Vec::new();
        for (position, (a, first)) in devices.iter().enumerate() {
            for (b, second) in &devices[position + 1..] {
                pairs.push(self.between((*a, first), (*b, second)));
            }
        }
        pairs
    }

    fn between(&self, (a, first): (u32, &Device<'_>), (b, second): (u32, &Device<'_>)) -> Pair {
        let status = |what| first.p2p_status(second, what);
        let peer_access = match (status(P2pCapabilitiesIndex::Read), status(P2pCapabilitiesIndex::Write)) {
            (Ok(P2pStatus::Ok), Ok(P2pStatus::Ok)) => PeerAccess::Yes,
            (Ok(P2pStatus::Ok), other) | (other, _) => PeerAccess::No(match other {
                Ok(status) => obstacle(status).to_owned(),
                Err(error) => error.to_string(),
            }),
        };
        let links =
            links_between(first, second, matches!(status(P2pCapabilitiesIndex::NvLink), Ok(P2pStatus::Ok)));
        let path = if links > 0 {
            PairPath::Nvlink(links)
        } else {
            // The handle is taken by value, and there is no other way to get it twice.
            let again = self.inner.device_by_index(b);
            again
                .and_then(|second| first.topology_common_ancestor(second))
                .map_or(PairPath::Unknown, pci_path)
        };
        let speed = link_speed(first);
        let nvlink_gbs = speed.filter(|_| links > 0).map(|gbs| gbs * f64::from(links));
        Pair { a, b, path, peer_access, nvlink_gbs }
    }

    /// Returns the bytes in use by all processes on each GPU, by UUID. A GPU that does not report them is left out.
    pub fn memory_used(&self) -> BTreeMap<String, u64> {
        self.devices()
            .filter_map(|device| Some((device.uuid().ok()?, device.memory_info().ok()?.used)))
            .collect()
    }

    fn devices(&self) -> impl Iterator<Item = Device<'_>> {
        let count = self.inner.device_count().unwrap_or(0);
        (0..count).filter_map(|index| self.inner.device_by_index(index).ok())
    }
}

impl std::fmt::Debug for Nvml {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nvml").field("place", &self.place).finish_non_exhaustive()
    }
}

fn look_at(index: u32, device: &Device<'_>) -> Gpu {
    let memory = device.memory_info().ok();
    let (mut up, mut down) = (0, 0);
    for link in 0..MOST_LINKS {
        match device.link_wrapper_for(link).is_active() {
            Ok(true) => up += 1,
            Ok(false) => down += 1,
            // This number is beyond the last link.
            Err(_) => {}
        }
    }
    let ecc_errors = |kind| device.total_ecc_errors(kind, EccCounter::Volatile).ok();
    Gpu {
        index,
        name: device.name().unwrap_or_else(|_| "a GPU that does not tell its name".into()),
        uuid: device.uuid().unwrap_or_default(),
        pci: device.pci_info().map(|info| info.bus_id).unwrap_or_default(),
        compute_capability: device.cuda_compute_capability().ok().map(|c| (c.major, c.minor)),
        memory_bytes: memory.as_ref().map_or(0, |memory| memory.total),
        memory_used_bytes: memory.as_ref().map_or(0, |memory| memory.used),
        ecc: device.is_ecc_enabled().ok().map(|state| state.currently_enabled),
        ecc_corrected: ecc_errors(MemoryError::Corrected),
        ecc_uncorrected: ecc_errors(MemoryError::Uncorrected),
        temperature: device.temperature(TemperatureSensor::Gpu).ok(),
        slowdown_temperature: device.temperature_threshold(TemperatureThreshold::Slowdown).ok(),
        throttled_by: device.current_throttle_reasons().map(throttles).unwrap_or_default(),
        mig: device.mig_mode().ok().map(|mode| mode.current == 1),
        prohibited: matches!(device.compute_mode(), Ok(ComputeMode::Prohibited)),
        nvlinks: up,
        nvlinks_down: down,
        nvlink_gbs: link_speed(device),
    }
}

/// Returns the bandwidth of one link in each direction, in GB/s: as the driver reports it, or else that of its generation.
fn link_speed(device: &Device<'_>) -> Option<f64> {
    told_speed(device).or_else(|| {
        let version = (0..MOST_LINKS).find_map(|link| device.link_wrapper_for(link).version().ok())?;
        speed_of(version)
    })
}

/// Returns the speed for NVML's number of the NVLink version: 1.0; 2.0 and 2.2; 3.0 and 3.1; 4.0; 5.0.
fn speed_of(version: u32) -> Option<f64> {
    match version {
        1 => Some(20.0),
        2..=6 => Some(25.0),
        7 => Some(50.0),
        _ => None,
    }
}

fn told_speed(device: &Device<'_>) -> Option<f64> {
    let sample = device.field_values_for(&[LINK_SPEED]).ok()?.into_iter().next()?.ok()?;
    let megabytes = match sample.value.ok()? {
        SampleValue::U32(value) => f64::from(value),
        SampleValue::U64(value) => value as f64,
        SampleValue::I64(value) => value as f64,
        SampleValue::F64(value) => value,
    };
    (megabytes > 0.0).then_some(megabytes / 1000.0)
}

/// Returns the links whose other end is the other GPU; if they end in switches, all links that both GPUs have.
fn links_between(first: &Device<'_>, second: &Device<'_>, reachable: bool) -> u32 {
    let active = |device: &Device<'_>| {
        (0..MOST_LINKS).filter(|link| matches!(device.link_wrapper_for(*link).is_active(), Ok(true))).count()
            as u32
    };
    let other = second.pci_info().ok().map(|info| info.bus_id);
    let direct = (0..MOST_LINKS)
        .filter(|link| matches!(first.link_wrapper_for(*link).is_active(), Ok(true)))
        .filter_map(|link| first.link_wrapper_for(link).remote_pci_info().ok())
        .filter(|remote| Some(&remote.bus_id) == other.as_ref())
        .count() as u32;
    if direct > 0 || !reachable { direct } else { active(first).min(active(second)) }
}

fn pci_path(level: TopologyLevel) -> PairPath {
    match level {
        TopologyLevel::Internal => PairPath::Board,
        TopologyLevel::Single => PairPath::Switch,
        TopologyLevel::Multiple => PairPath::Switches,
        TopologyLevel::HostBridge => PairPath::HostBridge,
        TopologyLevel::Node => PairPath::Node,
        TopologyLevel::System => PairPath::System,
    }
}

fn obstacle(status: P2pStatus) -> &'static str {
    match status {
        P2pStatus::Ok => "it is possible",
        P2pStatus::ChipsetNotSupported => "the chipset does not support it",
        P2pStatus::GpuNotSupported => "the GPUs do not support it",
        P2pStatus::IohTopologyNotSupported => "the PCI topology does not support it",
        P2pStatus::DisabledByRegkey => "it is disabled by a setting of the driver",
        P2pStatus::NotSupported => "it is not supported",
        P2pStatus::Unknown => "the driver does not say why",
    }
}

/// Returns the reasons that reduce the speed of the GPU; idleness and set clocks are none.
fn throttles(reasons: ThrottleReasons) -> Vec<String> {
    let known = [
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "heat (hardware)"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "heat (software)"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "the power supply's brake"),
        (ThrottleReasons::HW_SLOWDOWN, "the hardware's own protection"),
        (ThrottleReasons::SW_POWER_CAP, "the power limit"),
        (ThrottleReasons::SYNC_BOOST, "another GPU of its boost group"),
    ];
    known.iter().filter(|(flag, _)| reasons.contains(*flag)).map(|(_, what)| (*what).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_the_speed_of_their_generation() {
        // 18 links of version 4.0 are the 450 GB/s each way of an H100 or H200; 5.0 doubles that.
        let all = |version, links| speed_of(version).map(|each| each * f64::from(links));
        assert_eq!((all(6, 18), all(7, 18), all(4, 12)), (Some(450.0), Some(900.0), Some(300.0)));
        assert_eq!((speed_of(0), speed_of(99)), (None, None));
    }

    #[test]
    fn idleness_is_no_throttling() {
        assert_eq!(throttles(ThrottleReasons::GPU_IDLE), Vec::<String>::new());
        let both = ThrottleReasons::GPU_IDLE | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        assert_eq!(throttles(both), ["heat (hardware)"]);
    }

    #[test]
    fn the_library_is_there_and_counts_or_the_error_says_where_it_was_looked_for() {
        match Nvml::open() {
            Ok(nvml) => assert!(nvml.gpus().is_ok_and(|gpus| gpus.iter().all(|gpu| !gpu.uuid.is_empty()))),
            Err(error) => assert!(PLACES.iter().all(|place| error.to_string().contains(place)), "{error}"),
        }
    }
}
