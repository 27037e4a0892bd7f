//! The matrix library.

pub use cudarc::cublaslt::sys;

use super::symbols::foreign;
use super::symbols::{Table, Unusable, Version, functions};

functions! {
    /// cuBLASLt, matrix products.
    CublasLt {
        cublasLtGetVersion,
        cublasLtGetStatusString,
        cublasLtCreate,
        cublasLtDestroy,
        cublasLtMatmulDescCreate,
        cublasLtMatmulDescDestroy,
        cublasLtMatmulDescSetAttribute,
        cublasLtMatrixLayoutCreate,
        cublasLtMatrixLayoutDestroy,
        cublasLtMatmulPreferenceCreate,
        cublasLtMatmulPreferenceDestroy,
        cublasLtMatmulPreferenceSetAttribute,
        cublasLtMatmulAlgoGetHeuristic,
        cublasLtMatmul,
    }
}

impl Table for CublasLt {
    const NAME: &'static str = "cuBLASLt";
    const MINIMUM: Version = Version(12, 0, 0);

    fn version(&self) -> Result<Version, Unusable> {
        // SAFETY: takes nothing and may be called at any time.
        let number = unsafe { foreign!(cublaslt, self.cublasLtGetVersion()) } as u32;
        // 12.8.4 is 120804, 13.0.2 is 130002.
        Ok(Version(number / 10_000, number % 10_000 / 100, number % 100))
    }
}
