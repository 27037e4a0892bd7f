//! One GPU, as one rank uses it.

use std::ffi::{c_char, c_void};
use std::fmt;
use std::sync::{Arc, Weak};

use cudarc::driver::{CudaContext, CudaStream, sys};
use ryzanstein_config::DeviceConfig;

use super::budget::{Budget, MemoryUse};
use super::compile::Kernels;
use super::context::Context;
use super::driver::Driver;
use super::error::DeviceError;
use super::libraries::Libraries;
use super::stream::Stream;
use super::symbols::foreign;
use super::symbols::hex;
use crate::types::rank::LocalRank;

/// Properties that a GPU reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// CUDA's number of the GPU, among those that CUDA_VISIBLE_DEVICES shows.
    pub ordinal: u32,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Its PCI address, such as `0000:19:00.0`.
    pub pci: String,
    /// Its identity, as `nvidia-smi -L` shows it: `GPU-…`.
    pub uuid: String,
    /// Compute capability: (9, 0) is Hopper.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory in bytes to which a block may opt in.
    pub shared_bytes: u32,
    /// Bytes of memory.
    pub total_memory: u64,
}

impl DeviceInfo {
    /// Returns every GPU that CUDA shows this process, in CUDA's order. Takes none of them: makes no context.
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
    /// Takes the GPU whose number is the rank's position on its host, or the only one if CUDA shows one: Slurm's
    /// `--gpus-per-task=1` and containers show each rank its own.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] when CUDA shows fewer GPUs; those of the driver.
    pub fn open(
        libraries: &Arc<Libraries>,
        local_rank: LocalRank,
        config: &DeviceConfig,
    ) -> Result<Self, DeviceError> {
        let count = libraries.device_count()?;
        let ordinal = if count == 1 { 0 } else { local_rank.0 };
        if ordinal >= count {
            return Err(DeviceError::NoDevice { local_rank: ordinal, count });
        }
        let driver = libraries.driver.as_ref().map_err(Clone::clone)?.functions;
        let cuda = Context::primary(&driver, ordinal)?;
        Self::assemble(&driver, ordinal, cuda, Stream::new, libraries, config)
    }

    /// Takes over a GPU from an engine that uses cudarc: all calls of a group on this device, and the kernels of a model, run on
    /// the engine's own stream, in its order, also while it captures a graph.
    ///
    /// Groups add streams of their own to the context ([`CudaContext::new_stream`]) for asynchronous calls. So cudarc starts to
    /// track slices by events, if it has not yet, unless the engine has disabled that.
    ///
    /// # Errors
    /// When the stream is of another context; without a driver; those of the driver.
    pub fn from_cudarc(
        context: &Arc<CudaContext>,
        stream: &Arc<CudaStream>,
        libraries: &Arc<Libraries>,
        config: &DeviceConfig,
    ) -> Result<Self, DeviceError> {
        if !Arc::ptr_eq(stream.context(), context) {
            return Err(DeviceError::invalid(
                "a device is made of a stream and a context that is not the stream's; pass the stream's own",
            ));
        }
        let count = libraries.device_count()?;
        let ordinal = u32::try_from(context.ordinal()).unwrap_or(u32::MAX);
        if ordinal >= count {
            return Err(DeviceError::NoDevice { local_rank: ordinal, count });
        }
        let driver = libraries.driver.as_ref().map_err(Clone::clone)?.functions;
        let over = |own: &Arc<Context>| Ok(Stream::over(own, Arc::clone(stream)));
        Self::assemble(&driver, ordinal, Arc::clone(context), over, libraries, config)
    }

    /// Takes over a GPU from an engine that does not use this crate's cudarc: its `CUcontext` and `CUstream`. A null stream is the
    /// default one. Neither is destroyed when the device is dropped. Otherwise as [`from_cudarc`](Self::from_cudarc).
    ///
    /// # Errors
    /// Without a driver; those of the driver.
    ///
    /// # Safety
    /// `context` must be a context of the GPU with this number, and `stream` a stream of that context, both made with the
    /// driver that `libraries` has found. Both must stay until this device, its clones and everything made from them
    /// (groups, buffers, events, graphs, kernels) have been dropped.
    pub unsafe fn from_raw(
        ordinal: u32,
        context: *mut c_void,
        stream: *mut c_void,
        libraries: &Arc<Libraries>,
        config: &DeviceConfig,
    ) -> Result<Self, DeviceError> {
        let count = libraries.device_count()?;
        if ordinal >= count {
            return Err(DeviceError::NoDevice { local_rank: ordinal, count });
        }
        let driver = libraries.driver.as_ref().map_err(Clone::clone)?.functions;
        let (device, _) = look_at(&driver, ordinal)?;
        // First: if cudarc cannot make it current, it destroys it.
        // SAFETY: a context of this device, by the caller's promise.
        let code = unsafe { foreign!(driver, driver.cuCtxSetCurrent(context.cast())) };
        driver.check(ordinal, "cuCtxSetCurrent", code)?;
        // SAFETY: as above; it is kept from being destroyed just below.
        let cuda = unsafe { CudaContext::from_raw_context(ordinal as usize, device, context.cast()) }
            .map_err(|error| driver.refused(ordinal, "cuCtxSetCurrent", error))?;
        // cudarc destroys the objects that it wraps with the last reference: one reference is never returned.
        std::mem::forget(Arc::clone(&cuda));
        // SAFETY: a stream of this context that outlives the wrapper, by the caller's promise.
        let stream = unsafe { cuda.wrap_borrowed_stream(stream.cast()) };
        Self::from_cudarc(&cuda, &stream, libraries, config)
    }

    fn assemble(
        driver: &Driver,
        ordinal: u32,
        cuda: Arc<CudaContext>,
        stream: impl FnOnce(&Arc<Context>) -> Result<Stream, DeviceError>,
        libraries: &Arc<Libraries>,
        config: &DeviceConfig,
    ) -> Result<Self, DeviceError> {
        let (_, info) = look_at(driver, ordinal)?;
        let budget = Budget::new(ordinal, info.total_memory, config.memory_fraction.get());
        let context = Arc::new(Context::new(driver, ordinal, cuda, budget));
        let stream = stream(&context)?;
        let kernels = Arc::new(Kernels::new(&context, info.capability, libraries));
        Ok(Self { context, info: Arc::new(info), stream, libraries: Arc::clone(libraries), kernels })
    }

    /// Returns the properties that the GPU reports.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Returns CUDA's number of the GPU.
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal
    }

    /// Returns the stream on which this rank's computation and its collectives run, in the order of the calls; asynchronous ones
    /// have another stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Creates another stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new_stream(&self) -> Result<Stream, DeviceError> {
        Stream::new(&self.context)
    }

    /// Returns the libraries found.
    pub fn libraries(&self) -> &Arc<Libraries> {
        &self.libraries
    }

    /// Returns the kernels compiled for this GPU.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Returns the context as an object of cudarc.
    pub fn cudarc(&self) -> &Arc<CudaContext> {
        self.context.cuda()
    }

    /// Returns the driver's functions.
    pub fn driver(&self) -> &Driver {
        &self.context.driver
    }

    /// Makes this GPU the current one of this thread, as libraries other than the driver need it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn bind(&self) -> Result<(), DeviceError> {
        self.context.bind()
    }

    /// Returns the bytes allocated by this rank, and the bytes that it may allocate.
    pub fn budget(&self) -> (u64, u64) {
        (self.context.budget.allocated(), self.context.budget.limit())
    }

    /// Returns a handle that shows the rank's memory use while the device exists, without keeping it alive.
    pub fn memory_watch(&self) -> MemoryWatch {
        MemoryWatch(Arc::downgrade(&self.context))
    }

    /// For pools: notes that `bytes` of the allocated bytes are kept for later.
    pub fn pool_keeps(&self, bytes: u64) {
        self.context.budget.keep_idle(bytes);
    }

    /// For pools: notes that `bytes` of the kept bytes are used again, or freed.
    pub fn pool_gives(&self, bytes: u64) {
        self.context.budget.end_idle(bytes);
    }
}

/// Shows the GPU memory of a rank, from any thread.
#[derive(Clone)]
pub struct MemoryWatch(Weak<Context>);

impl MemoryWatch {
    /// Returns the memory use, or none once the device is dropped.
    pub fn read(&self) -> Option<MemoryUse> {
        Some(self.0.upgrade()?.budget.memory_use())
    }
}

impl fmt::Debug for MemoryWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MemoryWatch").field(&self.read()).finish()
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("info", &self.info).finish_non_exhaustive()
    }
}

fn attribute(
    driver: &Driver,
    ordinal: u32,
    device: sys::CUdevice,
    which: sys::CUdevice_attribute,
) -> Result<i32, DeviceError> {
    let mut value = 0;
    // SAFETY: the device is one that the driver gave; the pointer is to a live integer; what the driver does not know it refuses.
    let code = unsafe { foreign!(driver, driver.cuDeviceGetAttribute(&raw mut value, which, device)) };
    driver.check(ordinal, "cuDeviceGetAttribute", code)?;
    Ok(value)
}

/// Returns the driver's number of a GPU, and the properties that the GPU reports. The driver has been initialised.
fn look_at(driver: &Driver, ordinal: u32) -> Result<(sys::CUdevice, DeviceInfo), DeviceError> {
    let mut device = 0;
    // SAFETY: the pointer is to a live integer; a number that no GPU has is an error of the driver's.
    let code = unsafe { foreign!(driver, driver.cuDeviceGet(&raw mut device, ordinal as i32)) };
    driver.check(ordinal, "cuDeviceGet", code)?;
    Ok((device, describe(driver, ordinal, device)?))
}

fn describe(driver: &Driver, ordinal: u32, device: sys::CUdevice) -> Result<DeviceInfo, DeviceError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as CAPABILITY_MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as CAPABILITY_MINOR,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
    };
    let words = |call: &'static str, ask: &dyn Fn(*mut c_char, i32) -> i32| {
        let mut bytes = [0u8; 128];
        driver.check(ordinal, call, ask(bytes.as_mut_ptr().cast(), bytes.len() as i32))?;
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        Ok::<_, DeviceError>(String::from_utf8_lossy(&bytes[..end]).into_owned())
    };
    let name = words("cuDeviceGetName", &|text, length| {
        // SAFETY: the function writes a text that ends with a zero, of at most the length given, to a live array.
        unsafe { foreign!(driver, driver.cuDeviceGetName(text, length, device)) }
    })?;
    let pci = words("cuDeviceGetPCIBusId", &|text, length| {
        // SAFETY: as above.
        unsafe { foreign!(driver, driver.cuDeviceGetPCIBusId(text, length, device)) }
    })?;
    let number = |which| attribute(driver, ordinal, device, which).map(i32::unsigned_abs);
    let (mut uuid, mut total) = (sys::CUuuid { bytes: [0; 16] }, 0);
    // SAFETY: the pointer is to sixteen live bytes.
    let code = unsafe { foreign!(driver, driver.cuDeviceGetUuid_v2(&raw mut uuid, device)) };
    driver.check(ordinal, "cuDeviceGetUuid", code)?;
    // SAFETY: the pointer is to a live integer.
    let code = unsafe { foreign!(driver, driver.cuDeviceTotalMem_v2(&raw mut total, device)) };
    driver.check(ordinal, "cuDeviceTotalMem", code)?;
    Ok(DeviceInfo {
        ordinal,
        name,
        pci: pci.to_lowercase(),
        uuid: uuid_text(uuid.bytes.map(i8::cast_unsigned)),
        capability: (number(CAPABILITY_MAJOR)?, number(CAPABILITY_MINOR)?),
        multiprocessors: number(MULTIPROCESSORS)?,
        shared_bytes: number(SHARED)?,
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
