//! Whether this rank can use NCCL, found out before it joins, so that ranks can agree.

use std::sync::Arc;

use ryzanstein_config::{BackendChoice, Config};

use crate::backend::tcp::data_plane::Bound;
use crate::device::{Device, DeviceError, Libraries, Nccl, Surroundings};
use crate::error::Result;
use crate::nvml::Nvml;
use crate::rendezvous::Rendezvous;
use crate::roster::Gpu;

/// A GPU and the library, ready to be used.
pub(crate) struct Ready {
    pub(crate) device: Device,
    pub(crate) nccl: Nccl,
    version: u32,
    /// What its NVLinks carry together in one direction, in 10⁹ bytes per second, as NVML rates them.
    pub(crate) link_gbs: Option<f64>,
}

impl Ready {
    /// What the other ranks need to know of it.
    pub(crate) fn describe(&self) -> Gpu {
        let info = self.device.info();
        Gpu { uuid: info.uuid.clone(), name: info.name.clone(), nccl: self.version }
    }
}

/// Takes this rank's GPU, or says why it cannot be used with NCCL.
pub(crate) fn take(
    config: &Config,
    rendezvous: &dyn Rendezvous,
    surroundings: &Surroundings,
    bound: Option<&Result<Bound>>,
) -> Result<Ready, String> {
    if !matches!(config.process_group.backend, BackendChoice::Auto | BackendChoice::Nccl) {
        return Err("another backend was asked for".into());
    }
    let libraries = Arc::new(Libraries::find(&config.device, surroundings));
    libraries.driver.as_ref().map_err(ToString::to_string)?;
    libraries.nccl.as_ref().map_err(ToString::to_string)?;
    let local_rank = rendezvous.local_rank().ok_or(
        "this rank is given its position on its host only when it joins, and its GPU goes by that position: start it \
         with LOCAL_RANK, as `ryz launch` does",
    )?;
    reachable(bound)?;
    let device = Device::open(&libraries, local_rank, &config.device).map_err(|error| obstacle(&error))?;
    ready(device)
}

/// A GPU that the caller has opened, or the reason why it cannot be used with NCCL.
pub(crate) fn adopt(config: &Config, device: Device, bound: Option<&Result<Bound>>) -> Result<Ready, String> {
    if !matches!(config.process_group.backend, BackendChoice::Auto | BackendChoice::Nccl) {
        return Err("another backend was asked for".into());
    }
    reachable(bound)?;
    ready(device)
}

fn reachable(bound: Option<&Result<Bound>>) -> Result<(), String> {
    match bound {
        Some(Err(error)) => Err(format!("ranks watch each other over TCP beside NCCL: {error}")),
        _ => Ok(()),
    }
}

fn ready(device: Device) -> Result<Ready, String> {
    let libraries = Arc::clone(device.libraries());
    let nccl = libraries.nccl.as_ref().map_err(ToString::to_string)?;
    let version = nccl.version;
    tracing::debug!(
        gpu = device.info().name,
        uuid = device.info().uuid,
        nccl = %version,
        path = %nccl.path.display(),
        origin = %nccl.origin,
        "this rank can use NCCL"
    );
    let link_gbs = rated(&device.info().uuid);
    let version = version.0 * 10_000 + version.1 * 100 + version.2;
    Ok(Ready { device, nccl: nccl.functions, version, link_gbs })
}

/// In words that are the same on all ranks that have it: whoever tells it says on which.
fn obstacle(error: &DeviceError) -> String {
    match error {
        DeviceError::NoDevice { count, .. } => {
            format!("each rank of a host needs a GPU, and CUDA shows {}", DeviceError::shown(*count))
        }
        other => other.to_string(),
    }
}

/// Nothing depends on it but a column of the profile: who does not tell it is not asked why.
fn rated(uuid: &str) -> Option<f64> {
    let gpu = Nvml::open().ok()?.gpu(uuid)?;
    gpu.nvlink_gbs.map(|each| each * f64::from(gpu.nvlinks)).filter(|all| *all > 0.0)
}
