//! The present state of a GPU, for monitoring: a few cheap queries of NVML, and the meaning of the answers.

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use serde::{Deserialize, Serialize};

use super::{Nvml, throttles};

/// The present state of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuHealth {
    /// It responds.
    Present(GpuSample),
    /// It has fallen off the bus, or is unreachable for another reason. Only a reset of the GPU or of the host restores it.
    Lost,
}

/// The properties that a GPU reports at one moment. Values that it does not report are none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSample {
    /// Share of the last sample period in which a kernel ran, in percent.
    pub utilization: Option<u32>,
    /// Memory in use by all processes.
    pub memory_used_bytes: Option<u64>,
    /// All memory.
    pub memory_total_bytes: Option<u64>,
    /// Temperature in degrees Celsius.
    pub temperature: Option<u32>,
    /// Reasons that reduce the clocks at present. Idleness does not count.
    pub throttled_by: Option<Vec<String>>,
    /// Errors since the driver was loaded that ECC corrected.
    pub ecc_corrected: Option<u64>,
    /// Errors since the driver was loaded that ECC could not correct.
    pub ecc_uncorrected: Option<u64>,
}

/// Returns the present properties of a GPU.
///
/// # Errors
/// [`NvmlError::GpuLost`], if one answer is that.
fn sample(device: &Device<'_>) -> Result<GpuSample, NvmlError> {
    let ecc = |kind| told(device.total_ecc_errors(kind, EccCounter::Volatile));
    let memory = told(device.memory_info())?.map(|memory| (memory.used, memory.total));
    let (memory_used_bytes, memory_total_bytes) = memory.unzip();
    Ok(GpuSample {
        utilization: told(device.utilization_rates())?.map(|rates| rates.gpu),
        memory_used_bytes,
        memory_total_bytes,
        temperature: told(device.temperature(TemperatureSensor::Gpu))?,
        throttled_by: told(device.current_throttle_reasons())?.map(throttles),
        ecc_corrected: ecc(MemoryError::Corrected)?,
        ecc_uncorrected: ecc(MemoryError::Uncorrected)?,
    })
}

/// Keeps the error that the GPU is lost: one such answer is enough. Any other error only leaves out its own property.
fn told<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(lost @ NvmlError::GpuLost) => Err(lost),
        Err(_) => Ok(None),
    }
}

impl Nvml {
    /// Returns the present state of the GPU with this UUID; none if the host has no such GPU. A call takes milliseconds, but can
    /// hang with the driver: make it on a thread that nothing waits for.
    pub fn health(&self, uuid: &str) -> Option<GpuHealth> {
        match self.inner.device_by_uuid(uuid).and_then(|device| sample(&device)) {
            Ok(sample) => Some(GpuHealth::Present(sample)),
            Err(NvmlError::GpuLost) => Some(GpuHealth::Lost),
            Err(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_told_or_absent_or_that_the_gpu_is_lost() {
        assert!(matches!(told(Ok(0)), Ok(Some(0))));
        assert!(matches!(told::<u32>(Err(NvmlError::NotSupported)), Ok(None)));
        assert!(matches!(told::<u32>(Err(NvmlError::GpuLost)), Err(NvmlError::GpuLost)));
    }
}
