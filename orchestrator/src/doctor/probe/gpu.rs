use std::path::Path;

use ryzanstein_process_group::nvml::Nvml;

use super::{names, read};
use crate::doctor::facts::{DriverSide, GpuSide};
use crate::rendezvous::Environment;

const BUS: &str = "/sys/bus/pci/devices";

pub(super) fn probe(environment: &Environment) -> GpuSide {
    GpuSide {
        on_bus: names(BUS).iter().filter(|device| is_gpu(&Path::new(BUS).join(device))).count(),
        module: read("/sys/module/nvidia/version"),
        driver: driver(),
        visible: environment.get("CUDA_VISIBLE_DEVICES").cloned(),
    }
}

/// A display or 3D controller of NVIDIA's.
fn is_gpu(device: &Path) -> bool {
    let class = read(device.join("class")).unwrap_or_default();
    read(device.join("vendor")).as_deref() == Some("0x10de")
        && (class.starts_with("0x0300") || class.starts_with("0x0302"))
}

fn driver() -> Result<DriverSide, String> {
    let nvml = Nvml::open()?;
    Ok(DriverSide {
        version: nvml.driver_version(),
        cuda: nvml.cuda_version(),
        gpus: nvml.gpus()?,
        pairs: nvml.pairs(),
    })
}
