//! One GPU, as one rank uses it.

use std::ffi::c_char;
use std::fmt;
use std::sync::Arc;

use ryzanstein_config::DeviceConfig;

use super::budget::Budget;
use super::compile::Kernels;
use super::context::Context;
use super::driver::Driver;
use super::error::DeviceError;
use super::libraries::Libraries;
use super::stream::Stream;
use super::symbols::hex;
use crate::rank::LocalRank;

/// What a GPU says of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// CUDA's number of it, counted among those that CUDA_VISIBLE_DEVICES shows.
    pub ordinal: u32,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Its place on the PCI bus, such as `0000:19:00.0`.
    pub pci: String,
    /// Its identity, as `nvidia-smi -L` shows it: `GPU-…`.
    pub uuid: String,
    /// Compute capability: (9, 0) is Hopper.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Most bytes of shared memory a block may opt in to.
    pub shared_bytes: u32,
    /// Bytes of memory.
    pub total_memory: u64,
}

impl DeviceInfo {
    /// Every GPU that CUDA shows this process, in its order. None of them is taken: no context is made.
    ///
    /// # Errors
    /// Without a driver, and those of the driver.
    pub fn all(libraries: &Libraries) -> Result<Vec<Self>, DeviceError> {
        let count = libraries.device_count()?;
        let driver = libraries.driver.as_ref().map_err(Clone::clone)?.functions;
        (0..count).map(|ordinal| Ok(look_at(&driver, ordinal)?.1)).collect()
    }
}

/// A GPU with its compute stream. Clones are the same GPU.
#[derive(Clone)]
pub struct Device {
    pub(crate) context: Arc<Context>,
    info: Arc<DeviceInfo>,
    stream: Stream,
    libraries: Arc<Libraries>,
    kernels: Arc<Kernels>,
}

impl Device {
    /// Takes the GPU whose number is the rank's position on its host.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] when CUDA shows fewer GPUs; those of the driver.
    pub fn open(
        libraries: &Arc<Libraries>,
        local_rank: LocalRank,
        config: &DeviceConfig,
    ) -> Result<Self, DeviceError> {
        let count = libraries.device_count()?;
        let ordinal = local_rank.0;
        if ordinal >= count {
            return Err(DeviceError::NoDevice { local_rank: ordinal, count });
        }
        let driver = libraries.driver.as_ref().map_err(Clone::clone)?.functions;
        let (device, info) = look_at(&driver, ordinal)?;
        let budget = Budget::new(ordinal, info.total_memory, config.memory_fraction.get());
        let context = Arc::new(Context::retain(&driver, ordinal, device, budget)?);
        let stream = Stream::new(&context)?;
        let kernels = Arc::new(Kernels::new(&context, info.capability, libraries));
        Ok(Self { context, info: Arc::new(info), stream, libraries: Arc::clone(libraries), kernels })
    }

    /// What it says of itself.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// CUDA's number of it.
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal
    }

    /// The stream on which this rank's computation and its collectives run, in the order they are called; asynchronous ones
    /// have another.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// One more stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new_stream(&self) -> Result<Stream, DeviceError> {
        Stream::new(&self.context)
    }

    /// The libraries found.
    pub fn libraries(&self) -> &Arc<Libraries> {
        &self.libraries
    }

    /// Kernels compiled for this GPU.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The driver's functions.
    pub fn driver(&self) -> &Driver {
        &self.context.driver
    }

    /// Makes this GPU the current one of this thread, as libraries beside the driver's need it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn bind(&self) -> Result<(), DeviceError> {
        self.context.bind()
    }

    /// Bytes free and bytes in all, other processes counted.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn memory(&self) -> Result<(u64, u64), DeviceError> {
        self.context.free_and_total()
    }

    /// Bytes allocated by this rank, and bytes that it may allocate.
    pub fn budget(&self) -> (u64, u64) {
        (self.context.budget.allocated(), self.context.budget.limit())
    }

    /// An attribute of the GPU by CUDA's number of it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn attribute(&self, number: i32) -> Result<i32, DeviceError> {
        attribute(&self.context.driver, self.context.ordinal, self.context.device(), number)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("info", &self.info).finish_non_exhaustive()
    }
}

fn attribute(driver: &Driver, ordinal: u32, device: i32, number: i32) -> Result<i32, DeviceError> {
    let mut value = 0;
    // SAFETY: the device is one that the driver gave; the pointer is to a live integer; unknown numbers are refused.
    let code = unsafe { (driver.cuDeviceGetAttribute)(&raw mut value, number, device) };
    driver.check(ordinal, "cuDeviceGetAttribute", code)?;
    Ok(value)
}

/// The driver's number of a GPU, and what it says of itself. The driver has been initialised.
fn look_at(driver: &Driver, ordinal: u32) -> Result<(i32, DeviceInfo), DeviceError> {
    let mut device = 0;
    // SAFETY: the pointer is to a live integer; a number that no GPU has is an error of the driver's.
    let code = unsafe { (driver.cuDeviceGet)(&raw mut device, ordinal as i32) };
    driver.check(ordinal, "cuDeviceGet", code)?;
    Ok((device, describe(driver, ordinal, device)?))
}

fn describe(driver: &Driver, ordinal: u32, device: i32) -> Result<DeviceInfo, DeviceError> {
    let words = |call: &'static str, function: unsafe extern "C" fn(*mut c_char, i32, i32) -> i32| {
        let mut bytes = [0u8; 128];
        // SAFETY: the function writes a text that ends with a zero, of at most the length given, to a live array.
        let code = unsafe { function(bytes.as_mut_ptr().cast(), bytes.len() as i32, device) };
        driver.check(ordinal, call, code)?;
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        Ok::<_, DeviceError>(String::from_utf8_lossy(&bytes[..end]).into_owned())
    };
    let number = |number| attribute(driver, ordinal, device, number).map(i32::unsigned_abs);
    let (mut uuid, mut total) = ([0u8; 16], 0);
    // SAFETY: the pointer is to sixteen live bytes.
    let code = unsafe { (driver.cuDeviceGetUuid_v2)(&raw mut uuid, device) };
    driver.check(ordinal, "cuDeviceGetUuid", code)?;
    // SAFETY: the pointer is to a live integer.
    let code = unsafe { (driver.cuDeviceTotalMem_v2)(&raw mut total, device) };
    driver.check(ordinal, "cuDeviceTotalMem", code)?;
    Ok(DeviceInfo {
        ordinal,
        name: words("cuDeviceGetName", driver.cuDeviceGetName)?,
        pci: words("cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId)?.to_lowercase(),
        uuid: uuid_text(uuid),
        capability: (number(75)?, number(76)?),
        multiprocessors: number(16)?,
        shared_bytes: number(97)?,
        total_memory: total as u64,
    })
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let hex = hex(&bytes);
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_uuid_is_written_as_nvidia_smi_writes_it() {
        let bytes = std::array::from_fn(|i| i as u8);
        assert_eq!(super::uuid_text(bytes), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
