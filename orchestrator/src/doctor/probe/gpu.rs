use std::path::Path;
use std::time::Duration;

use ryzanstein_config::DeviceConfig;
use ryzanstein_process_group::device::{DeviceInfo, Libraries, Surroundings};
use ryzanstein_process_group::nvml::Nvml;

use super::{names, read, trial};
use crate::doctor::ProbeCommand;
use crate::doctor::facts::{DriverFacts, GpuFacts, VisibleGpu};
use crate::rendezvous::Environment;

const BUS: &str = "/sys/bus/pci/devices";
/// How long CUDA may take to count GPUs, the loading of libraries included.
const DEADLINE: Duration = Duration::from_secs(60);

pub(super) fn probe(environment: &Environment, helper: &ProbeCommand) -> GpuFacts {
    let driver = driver();
    // Where NVML lists none there are none that CUDA could show.
    let has_gpus = driver.as_ref().is_ok_and(|driver| !driver.gpus.is_empty());
    let ask = || trial::bounded(helper.command(&["gpus"]), DEADLINE).and_then(|text| trial::answer(&text));
    GpuFacts {
        on_bus: names(BUS).iter().filter(|device| is_gpu(&Path::new(BUS).join(device))).count(),
        module: read("/sys/module/nvidia/version"),
        driver,
        visible: environment.get("CUDA_VISIBLE_DEVICES").cloned(),
        shown: if has_gpus { ask() } else { Ok(Vec::new()) },
    }
}

/// In the other process: the GPUs that CUDA shows it. NVML, which knows nothing of `CUDA_VISIBLE_DEVICES`, lists more.
///
/// # Errors
/// Why CUDA cannot be asked.
pub fn visible_gpus(config: &DeviceConfig) -> Result<Vec<VisibleGpu>, String> {
    let libraries = Libraries::find(config, &Surroundings::default());
    let all = DeviceInfo::all(&libraries).map_err(|error| error.to_string())?;
    Ok(all.into_iter().map(|gpu| VisibleGpu { uuid: gpu.uuid, pci: gpu.pci }).collect())
}

/// A display or 3D controller of NVIDIA's.
fn is_gpu(device: &Path) -> bool {
    let class = read(device.join("class")).unwrap_or_default();
    read(device.join("vendor")).as_deref() == Some("0x10de")
        && (class.starts_with("0x0300") || class.starts_with("0x0302"))
}

fn driver() -> Result<DriverFacts, String> {
    let nvml = Nvml::open()?;
    Ok(DriverFacts {
        version: nvml.driver_version(),
        cuda: nvml.cuda_version(),
        gpus: nvml.gpus()?,
        pairs: nvml.pairs(),
    })
}
