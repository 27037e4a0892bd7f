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

/// NVML's answers.
struct Answers {
    utilization: Result<u32, NvmlError>,
    /// Used and total memory.
    memory: Result<(u64, u64), NvmlError>,
    temperature: Result<u32, NvmlError>,
    throttled_by: Result<Vec<String>, NvmlError>,
    ecc_corrected: Result<u64, NvmlError>,
    ecc_uncorrected: Result<u64, NvmlError>,
}

impl Answers {
    fn of(device: &Device<'_>) -> Self {
        let ecc = |kind| device.total_ecc_errors(kind, EccCounter::Volatile);
        Self {
            utilization: device.utilization_rates().map(|rates| rates.gpu),
            memory: device.memory_info().map(|memory| (memory.used, memory.total)),
            temperature: device.temperature(TemperatureSensor::Gpu),
            throttled_by: device.current_throttle_reasons().map(throttles),
            ecc_corrected: ecc(MemoryError::Corrected),
            ecc_uncorrected: ecc(MemoryError::Uncorrected),
        }
    }

    /// Combines the answers. A single answer that the GPU is lost is enough; any other error only leaves out its own field.
    fn health(self) -> GpuHealth {
        let Self { utilization, memory, temperature, throttled_by, ecc_corrected, ecc_uncorrected } = self;
        let lost = [
            utilization.as_ref().err(),
            memory.as_ref().err(),
            temperature.as_ref().err(),
            throttled_by.as_ref().err(),
            ecc_corrected.as_ref().err(),
            ecc_uncorrected.as_ref().err(),
        ];
        if lost.into_iter().flatten().any(is_lost) {
            return GpuHealth::Lost;
        }
        let (memory_used_bytes, memory_total_bytes) = memory.ok().unzip();
        GpuHealth::Present(GpuSample {
            utilization: utilization.ok(),
            memory_used_bytes,
            memory_total_bytes,
            temperature: temperature.ok(),
            throttled_by: throttled_by.ok(),
            ecc_corrected: ecc_corrected.ok(),
            ecc_uncorrected: ecc_uncorrected.ok(),
        })
    }
}

const fn is_lost(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost)
}

impl Nvml {
    /// Returns the present state of the GPU with this UUID; none if the host has no such GPU. A call takes milliseconds, but can
    /// hang with the driver: make it on a thread that nothing waits for.
    pub fn health(&self, uuid: &str) -> Option<GpuHealth> {
        match self.inner.device_by_uuid(uuid) {
            Ok(device) => Some(Answers::of(&device).health()),
            Err(error) => is_lost(&error).then_some(GpuHealth::Lost),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers() -> Answers {
        Answers {
            utilization: Ok(97),
            memory: Ok((20, 100)),
            temperature: Ok(61),
            throttled_by: Ok(vec![]),
            ecc_corrected: Ok(0),
            ecc_uncorrected: Ok(0),
        }
    }

    #[test]
    fn what_a_gpu_does_not_tell_is_absent_and_not_zero() {
        let refused = || NvmlError::NotSupported;
        let quiet = Answers {
            utilization: Err(refused()),
            memory: Err(refused()),
            temperature: Err(refused()),
            throttled_by: Err(refused()),
            ecc_corrected: Err(refused()),
            ecc_uncorrected: Err(refused()),
        };
        assert_eq!(quiet.health(), GpuHealth::Present(GpuSample::default()));
        let no_ecc = Answers { ecc_corrected: Err(refused()), ..answers() };
        let GpuHealth::Present(sample) = no_ecc.health() else { panic!("it answers") };
        assert_eq!((sample.ecc_corrected, sample.ecc_uncorrected), (None, Some(0)));
        assert_eq!(
            (sample.utilization, sample.memory_used_bytes, sample.memory_total_bytes),
            (Some(97), Some(20), Some(100))
        );
        assert_eq!(sample.throttled_by, Some(vec![]), "told, and nothing throttles it");
    }

    #[test]
    fn one_answer_that_it_is_lost_is_enough() {
        let lost = Answers { temperature: Err(NvmlError::GpuLost), ..answers() };
        assert_eq!(lost.health(), GpuHealth::Lost);
        let lost = Answers { ecc_uncorrected: Err(NvmlError::GpuLost), ..answers() };
        assert_eq!(lost.health(), GpuHealth::Lost);
        assert!(matches!(answers().health(), GpuHealth::Present(_)));
    }
}
