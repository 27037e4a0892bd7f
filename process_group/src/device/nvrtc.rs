//! The run-time compiler's library.

use super::symbols::foreign;
use super::symbols::{Table, Unusable, Version, functions};

functions! {
    /// NVRTC, the compiler of CUDA C++ at run time.
    Nvrtc {
        nvrtcVersion,
        nvrtcGetErrorString,
        nvrtcGetNumSupportedArchs,
        nvrtcGetSupportedArchs,
        nvrtcCreateProgram,
        nvrtcCompileProgram,
        nvrtcGetProgramLogSize,
        nvrtcGetProgramLog,
        nvrtcGetCUBINSize,
        nvrtcGetCUBIN,
        nvrtcGetPTXSize,
        nvrtcGetPTX,
        nvrtcDestroyProgram,
    }
}

impl Table for Nvrtc {
    const NAME: &'static str = "NVRTC";
    const MINIMUM: Version = Version(12, 0, 0);

    fn version(&self) -> Result<Version, Unusable> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        let code = unsafe { foreign!(nvrtc, self.nvrtcVersion(&raw mut major, &raw mut minor)) };
        if code != 0 {
            return Err(Unusable::NoVersion { call: "nvrtcVersion", code });
        }
        Ok(Version(major.unsigned_abs(), minor.unsigned_abs(), 0))
    }
}
