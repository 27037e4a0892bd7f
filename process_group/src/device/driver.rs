//! The driver's library.

use super::discover::file_of;
use super::error::DeviceError;
use super::symbols::foreign;
use super::symbols::{Symbol, Table, Unusable, Version, functions, text};

functions! {
    /// CUDA's driver interface, where cudarc's objects do not cover it or would need one more call.
    Driver {
        cuInit,
        cuDriverGetVersion,
        cuGetErrorName,
        cuGetErrorString,
        cuDeviceGetCount,
        cuDeviceGet,
        cuDeviceGetName,
        cuDeviceGetAttribute,
        cuDeviceGetUuid_v2,
        cuDeviceGetPCIBusId,
        cuDeviceTotalMem_v2,
        cuDeviceCanAccessPeer,
        cuCtxSetCurrent,
        cuCtxEnablePeerAccess,
        cuMemGetInfo_v2,
        cuMemAlloc_v2,
        cuMemFree_v2,
        cuIpcGetMemHandle,
        cuIpcOpenMemHandle_v2,
        cuIpcCloseMemHandle,
        cuMemHostGetDevicePointer_v2,
        cuMemcpyHtoDAsync_v2,
        cuMemcpyDtoHAsync_v2,
        cuMemcpyDtoDAsync_v2,
        cuMemsetD8Async,
        cuStreamQuery,
        cuStreamWaitEvent,
        cuStreamBeginCapture_v2,
        cuStreamEndCapture,
        cuStreamIsCapturing,
        cuThreadExchangeStreamCaptureMode,
        cuEventRecord,
        cuEventRecordWithFlags,
        cuEventQuery,
        cuEventElapsedTime,
        cuGraphInstantiateWithFlags,
        cuGraphLaunch,
        cuGraphGetNodes,
        cuGraphExecDestroy,
        cuGraphDestroy,
        cuLaunchKernelEx,
        cuTensorMapEncodeTiled,
    }
}

/// Not an error: the queried work is still in progress.
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const OUT_OF_MEMORY: i32 = 2;

impl Table for Driver {
    const NAME: &'static str = "the CUDA driver";
    const MINIMUM: Version = Version(12, 0, 0);

    fn version(&self) -> Result<Version, Unusable> {
        let mut number = 0;
        // SAFETY: the pointer is to a live integer; this function may be called before all others.
        let code = unsafe { foreign!(driver, self.cuDriverGetVersion(&raw mut number)) };
        if code != 0 {
            return Err(Unusable::NoVersion { call: "cuDriverGetVersion", code });
        }
        let number = number.unsigned_abs();
        Ok(Version(number / 1000, number % 1000 / 10, 0))
    }

    fn refuse(&self) -> Result<(), Unusable> {
        // SAFETY: opens libraries of the driver's names, one of which is open already.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(Unusable::UnknownToLoader);
        }
        // SAFETY: one of the names has just been found, so this finds it too.
        let theirs = Symbol::find_in(unsafe { cudarc::driver::sys::culib() }, "cuInit")?;
        if theirs.address() == self.cuInit.address() {
            return Ok(());
        }
        Err(Unusable::Shadowed(file_of(theirs.address())))
    }
}

impl Driver {
    /// Turns a status into a result.
    pub(crate) fn check(&self, device: u32, call: &'static str, code: i32) -> Result<(), DeviceError> {
        if code == 0 { Ok(()) } else { Err(self.error(device, call, code)) }
    }

    #[cold]
    pub(crate) fn error(&self, device: u32, call: &'static str, code: i32) -> DeviceError {
        let (mut name, mut words) = (std::ptr::null(), std::ptr::null());
        // SAFETY: both functions accept any code; what they point to is constant text of the library, or null.
        let (name, text) = unsafe {
            foreign!(driver, self.cuGetErrorName(code code, &raw mut name));
            foreign!(driver, self.cuGetErrorString(code code, &raw mut words));
            (text(name), text(words))
        };
        DeviceError::Driver { call, device, code, name, text }
    }

    /// Converts an error of cudarc, as if the call had been made here.
    pub(crate) fn refused(
        &self,
        device: u32,
        call: &'static str,
        error: cudarc::driver::DriverError,
    ) -> DeviceError {
        self.error(device, call, error.0 as i32)
    }
}
