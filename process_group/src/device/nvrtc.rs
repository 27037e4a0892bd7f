//! The run-time compiler's library.

use std::ffi::c_char;

use libloading::os::unix::Library;

use super::symbols::{Handle, Table, Version, functions};

functions! {
    /// NVRTC, the compiler of CUDA C++ at run time.
    Nvrtc {
        nvrtcVersion(*mut i32, *mut i32) -> i32;
        nvrtcGetErrorString(i32) -> *const c_char;
        nvrtcGetNumSupportedArchs(*mut i32) -> i32;
        nvrtcGetSupportedArchs(*mut i32) -> i32;
        nvrtcCreateProgram(*mut Handle, *const c_char, *const c_char, i32, *const *const c_char, *const *const c_char) -> i32;
        nvrtcCompileProgram(Handle, i32, *const *const c_char) -> i32;
        nvrtcGetProgramLogSize(Handle, *mut usize) -> i32;
        nvrtcGetProgramLog(Handle, *mut c_char) -> i32;
        nvrtcGetCUBINSize(Handle, *mut usize) -> i32;
        nvrtcGetCUBIN(Handle, *mut c_char) -> i32;
        nvrtcGetPTXSize(Handle, *mut usize) -> i32;
        nvrtcGetPTX(Handle, *mut c_char) -> i32;
        nvrtcDestroyProgram(*mut Handle) -> i32;
    }
}

impl Table for Nvrtc {
    const NAME: &'static str = "NVRTC";
    const MINIMUM: Version = Version(12, 0, 0);

    fn load(library: &Library) -> Result<Self, String> {
        Self::take(library)
    }

    fn version(&self) -> Result<Version, String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        let code = unsafe { (self.nvrtcVersion)(&raw mut major, &raw mut minor) };
        if code != 0 {
            return Err(format!("nvrtcVersion returned {code}"));
        }
        Ok(Version(major.unsigned_abs(), minor.unsigned_abs(), 0))
    }

    fn address(&self) -> usize {
        self.first_address()
    }
}
