use std::path::Path;
use std::time::Duration;

use ryzanstein_config::DeviceConfig;
use ryzanstein_process_group::device::{DeviceError, DeviceInfo, Libraries, LibrarySearch};
use ryzanstein_process_group::nvml::{Nvml, NvmlError};

use super::{names, pci, process};
use crate::doctor::ProbeCommand;
use crate::doctor::facts::{DriverFacts, GpuFacts, VisibleGpu};
use ryzanstein_benches::cgroup::read;
use ryzanstein_orchestrator::rendezvous::Environment;

const BUS: &str = "/sys/bus/pci/devices";
/// Timeout for CUDA to list GPUs, loading libraries included.
const DEADLINE: Duration = Duration::from_secs(60);

pub(super) fn probe(environment: &Environment, probe: &ProbeCommand) -> GpuFacts {
    let driver = driver().map_err(|error| error.to_string());
    // If NVML lists no GPU, CUDA has none to show.
    let has_gpus = driver.as_ref().is_ok_and(|driver| !driver.gpus.is_empty());
    let ask = || process::answer(&process::output(probe.command(&["gpus"]), DEADLINE)?);
    GpuFacts {
        on_bus: names(BUS).iter().filter(|device| is_gpu(&Path::new(BUS).join(device))).count(),
        module: read("/sys/module/nvidia/version"),
        driver,
        visible: environment.get("CUDA_VISIBLE_DEVICES").cloned(),
        shown: if has_gpus { ask() } else { Ok(Vec::new()) },
    }
}

/// Returns the GPUs that CUDA shows. Runs in the probe's process. NVML ignores `CUDA_VISIBLE_DEVICES` and may list more.
///
/// # Errors
/// Returns the error of CUDA when it cannot be used.
pub fn visible_gpus(config: &DeviceConfig) -> Result<Vec<VisibleGpu>, DeviceError> {
    let libraries = Libraries::find(config, &LibrarySearch::default());
    let all = DeviceInfo::all(&libraries)?;
    Ok(all.into_iter().map(|gpu| VisibleGpu { uuid: gpu.uuid, pci: gpu.pci }).collect())
}

/// Returns true if a PCI device is a display or 3D controller of NVIDIA's.
fn is_gpu(device: &Path) -> bool {
    let class = read(device.join("class")).unwrap_or_default();
    read(device.join("vendor")).as_deref() == Some("0x10de")
        && (class.starts_with("0x0300") || class.starts_with("0x0302"))
}

pub(super) fn driver() -> Result<DriverFacts, NvmlError> {
    let nvml = Nvml::open()?;
    let gpus = nvml.gpus()?;
    let places = gpus.iter().filter_map(|gpu| Some((gpu.index, pci::place(device_of(&gpu.pci)?)?)));
    Ok(DriverFacts {
        version: nvml.driver_version(),
        cuda: nvml.cuda_version(),
        places: places.collect(),
        pairs: nvml.pairs(),
        gpus,
    })
}

/// Returns the kernel's folder of a GPU. NVML writes eight digits of the domain, in capitals; the kernel writes four.
fn device_of(pci: &str) -> Option<std::path::PathBuf> {
    let (domain, rest) = pci.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(Path::new(BUS).join(format!("{domain:04x}:{}", rest.to_lowercase())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_that_nvml_reports_leads_to_the_folder_of_the_kernel() {
        let folder = device_of("00000000:1B:00.0").expect("an address");
        assert!(folder.ends_with("devices/0000:1b:00.0"), "{}", folder.display());
        assert!(device_of("10000:3D:00.0").is_some_and(|folder| folder.ends_with("10000:3d:00.0")));
        assert_eq!(device_of(""), None);
    }
}
