//! The matrix library.

use std::ffi::{c_char, c_void};

use libloading::os::unix::Library;

use super::symbols::{Address, Handle, Table, Version, functions};

functions! {
    /// cuBLASLt, matrix products.
    CublasLt {
        cublasLtGetVersion() -> usize;
        cublasLtGetStatusString(i32) -> *const c_char;
        cublasLtCreate(*mut Handle) -> i32;
        cublasLtDestroy(Handle) -> i32;
        cublasLtMatmulDescCreate(*mut Handle, i32, i32) -> i32;
        cublasLtMatmulDescDestroy(Handle) -> i32;
        cublasLtMatmulDescSetAttribute(Handle, i32, *const c_void, usize) -> i32;
        cublasLtMatrixLayoutCreate(*mut Handle, i32, u64, u64, i64) -> i32;
        cublasLtMatrixLayoutDestroy(Handle) -> i32;
        cublasLtMatrixLayoutSetAttribute(Handle, i32, *const c_void, usize) -> i32;
        cublasLtMatmulPreferenceCreate(*mut Handle) -> i32;
        cublasLtMatmulPreferenceDestroy(Handle) -> i32;
        cublasLtMatmulPreferenceSetAttribute(Handle, i32, *const c_void, usize) -> i32;
        cublasLtMatmulAlgoGetHeuristic(
            Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Heuristic, *mut i32,
        ) -> i32;
        cublasLtMatmul(
            Handle, Handle, *const c_void, Address, Handle, Address, Handle, *const c_void, Address, Handle, Address,
            Handle, *const Algorithm, Address, usize, Handle,
        ) -> i32;
    }
}

/// `cublasLtMatmulAlgo_t`: how a product is computed. Opaque.
#[repr(C)]
#[allow(missing_docs, reason = "opaque")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Algorithm {
    pub data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[allow(missing_docs, reason = "the fields are the library's")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Heuristic {
    pub algorithm: Algorithm,
    pub workspace: usize,
    pub state: i32,
    pub waves: f32,
    pub reserved: [i32; 4],
}

impl Table for CublasLt {
    const NAME: &'static str = "cuBLASLt";
    const MINIMUM: Version = Version(12, 0, 0);

    fn load(library: &Library) -> Result<Self, String> {
        Self::take(library)
    }

    fn version(&self) -> Result<Version, String> {
        // SAFETY: takes nothing and may be called at any time.
        let number = unsafe { (self.cublasLtGetVersion)() } as u32;
        // 12.8.4 is 120804, 13.0.2 is 130002.
        Ok(Version(number / 10_000, number % 10_000 / 100, number % 100))
    }

    fn address(&self) -> usize {
        self.first_address()
    }
}
