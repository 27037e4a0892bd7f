//! The driver's library.

use std::ffi::{c_char, c_void};

use libloading::os::unix::Library;

use super::error::DeviceError;
use super::symbols::{Address, Handle, Table, Version, functions, text};

functions! {
    /// CUDA's driver interface.
    Driver {
        cuInit(u32) -> i32;
        cuDriverGetVersion(*mut i32) -> i32;
        cuGetErrorName(i32, *mut *const c_char) -> i32;
        cuGetErrorString(i32, *mut *const c_char) -> i32;
        cuDeviceGetCount(*mut i32) -> i32;
        cuDeviceGet(*mut i32, i32) -> i32;
        cuDeviceGetName(*mut c_char, i32, i32) -> i32;
        cuDeviceGetAttribute(*mut i32, i32, i32) -> i32;
        cuDeviceGetUuid_v2(*mut [u8; 16], i32) -> i32;
        cuDeviceGetPCIBusId(*mut c_char, i32, i32) -> i32;
        cuDeviceTotalMem_v2(*mut usize, i32) -> i32;
        cuDeviceCanAccessPeer(*mut i32, i32, i32) -> i32;
        cuDevicePrimaryCtxRetain(*mut Handle, i32) -> i32;
        cuDevicePrimaryCtxRelease_v2(i32) -> i32;
        cuCtxSetCurrent(Handle) -> i32;
        cuCtxEnablePeerAccess(Handle, u32) -> i32;
        cuMemGetInfo_v2(*mut usize, *mut usize) -> i32;
        cuMemAlloc_v2(*mut Address, usize) -> i32;
        cuMemFree_v2(Address) -> i32;
        cuMemGetAddressRange_v2(*mut Address, *mut usize, Address) -> i32;
        cuMemHostAlloc(*mut *mut c_void, usize, u32) -> i32;
        cuMemHostGetDevicePointer_v2(*mut Address, *mut c_void, u32) -> i32;
        cuMemFreeHost(*mut c_void) -> i32;
        cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Handle) -> i32;
        cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Handle) -> i32;
        cuMemcpyDtoDAsync_v2(Address, Address, usize, Handle) -> i32;
        cuMemsetD8Async(Address, u8, usize, Handle) -> i32;
        cuMemsetD32Async(Address, u32, usize, Handle) -> i32;
        cuIpcGetMemHandle(*mut IpcHandle, Address) -> i32;
        cuIpcOpenMemHandle_v2(*mut Address, IpcHandle, u32) -> i32;
        cuIpcCloseMemHandle(Address) -> i32;
        cuStreamCreateWithPriority(*mut Handle, u32, i32) -> i32;
        cuStreamDestroy_v2(Handle) -> i32;
        cuStreamQuery(Handle) -> i32;
        cuStreamWaitEvent(Handle, Handle, u32) -> i32;
        cuStreamBeginCapture_v2(Handle, i32) -> i32;
        cuStreamEndCapture(Handle, *mut Handle) -> i32;
        cuStreamIsCapturing(Handle, *mut i32) -> i32;
        cuCtxGetStreamPriorityRange(*mut i32, *mut i32) -> i32;
        cuEventCreate(*mut Handle, u32) -> i32;
        cuEventRecord(Handle, Handle) -> i32;
        cuEventRecordWithFlags(Handle, Handle, u32) -> i32;
        cuEventQuery(Handle) -> i32;
        cuEventElapsedTime(*mut f32, Handle, Handle) -> i32;
        cuEventDestroy_v2(Handle) -> i32;
        cuGraphInstantiateWithFlags(*mut Handle, Handle, u64) -> i32;
        cuGraphLaunch(Handle, Handle) -> i32;
        cuGraphGetNodes(Handle, *mut Handle, *mut usize) -> i32;
        cuGraphExecDestroy(Handle) -> i32;
        cuGraphDestroy(Handle) -> i32;
        cuModuleLoadData(*mut Handle, *const c_void) -> i32;
        cuModuleUnload(Handle) -> i32;
        cuModuleGetFunction(*mut Handle, Handle, *const c_char) -> i32;
        cuFuncSetAttribute(Handle, i32, i32) -> i32;
        cuFuncGetAttribute(*mut i32, i32, Handle) -> i32;
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut i32, Handle, i32, usize) -> i32;
        cuLaunchKernelEx(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void) -> i32;
    }
}

/// `CUipcMemHandle`, passed by value.
#[repr(C)]
#[allow(missing_docs, reason = "opaque")]
#[derive(Clone, Copy, Debug)]
pub struct IpcHandle(pub [u8; 64]);

/// `CUlaunchConfig`.
#[repr(C)]
#[allow(missing_docs, reason = "the fields are CUDA's")]
#[derive(Debug)]
pub struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub stream: Handle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: u32,
}

/// `CUlaunchAttribute`.
#[repr(C)]
#[allow(missing_docs, reason = "the fields are CUDA's")]
#[derive(Clone, Copy, Debug)]
pub struct LaunchAttribute {
    pub id: u32,
    pub pad: u32,
    /// Eight-byte words, as the union is aligned to them.
    pub value: [u64; 8],
}

/// Not an error: what was asked about is still going on.
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const OUT_OF_MEMORY: i32 = 2;

impl Table for Driver {
    const NAME: &'static str = "the CUDA driver";
    const MINIMUM: Version = Version(12, 0, 0);

    fn load(library: &Library) -> Result<Self, String> {
        Self::take(library)
    }

    fn version(&self) -> Result<Version, String> {
        let mut number = 0;
        // SAFETY: the pointer is to a live integer; this function may be called before all others.
        let code = unsafe { (self.cuDriverGetVersion)(&raw mut number) };
        if code != 0 {
            return Err(format!("cuDriverGetVersion returned {code}"));
        }
        let number = number.unsigned_abs();
        Ok(Version(number / 1000, number % 1000 / 10, 0))
    }

    fn address(&self) -> usize {
        self.first_address()
    }
}

impl Driver {
    /// Turns a status into a result.
    pub(crate) fn check(&self, device: u32, call: &'static str, code: i32) -> Result<(), DeviceError> {
        if code == 0 { Ok(()) } else { Err(self.error(device, call, code)) }
    }

    #[cold]
    pub(crate) fn error(&self, device: u32, call: &'static str, code: i32) -> DeviceError {
        let of = |function: unsafe extern "C" fn(i32, *mut *const c_char) -> i32| {
            let mut words = std::ptr::null();
            // SAFETY: both functions accept any code; what they point to is constant text of the library, or null.
            unsafe {
                function(code, &raw mut words);
                text(words)
            }
        };
        DeviceError::Driver {
            call,
            device,
            code,
            name: of(self.cuGetErrorName),
            text: of(self.cuGetErrorString),
        }
    }
}
