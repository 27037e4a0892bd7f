//! Matrix products with cuBLASLt.

#![expect(unsafe_code, reason = "the functions of cuBLASLt are foreign; each block says why it holds")]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex};

use ryzanstein_process_group::DType;
use ryzanstein_process_group::device::DeviceError;
use ryzanstein_process_group::device::cublaslt::CublasLt;
use ryzanstein_process_group::device::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasLtReductionScheme_t, cudaDataType_t,
};
use ryzanstein_process_group::foreign;

use crate::error::Result;
use crate::float::UnsupportedDType;
use crate::gpu::{Block, Gpu, lock};

/// Size of cuBLASLt's workspace, as its authors recommend for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// The problem `out[m, n] = x[m, k] · w[n, k]ᵀ`, all row-major.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Problem {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Type of both operands.
    pub(super) operands: DType,
    pub(super) out: DType,
    /// True if a vector of length `n`, of the type of the result, is added to every row.
    pub(super) bias: bool,
}

/// Addresses of the operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub(super) x: u64,
    pub(super) w: u64,
    pub(super) bias: Option<u64>,
    pub(super) out: u64,
}

/// A problem in the terms of the library, and the algorithm that solves it.
#[derive(Debug)]
struct Plan {
    product: cublasLtMatmulDesc_t,
    layouts: [cublasLtMatrixLayout_t; 3],
    algorithm: cublasLtMatmulAlgo_t,
}

// SAFETY: the handles are used by one thread at a time, behind the lock of `Matmul::plans`.
unsafe impl Send for Plan {}

/// cuBLASLt on one GPU, with the plans of earlier problems.
#[derive(Debug)]
pub(super) struct Matmul {
    gpu: Arc<Gpu>,
    library: CublasLt,
    handle: LibraryHandle,
    workspace: Block,
    plans: Mutex<HashMap<Problem, Plan>>,
}

/// The handle of the library.
#[derive(Clone, Copy, Debug)]
struct LibraryHandle(cublasLtHandle_t);

// SAFETY: the library allows any number of threads to use one handle.
unsafe impl Send for LibraryHandle {}
// SAFETY: as above.
unsafe impl Sync for LibraryHandle {}

fn data_type(dtype: DType) -> Result<cudaDataType_t, UnsupportedDType> {
    match dtype {
        DType::F32 => Ok(cudaDataType_t::CUDA_R_32F),
        DType::F16 => Ok(cudaDataType_t::CUDA_R_16F),
        DType::BF16 => Ok(cudaDataType_t::CUDA_R_16BF),
        other => Err(UnsupportedDType(other)),
    }
}

/// Products and sums in full f32, never with the shorter mantissa of TF32.
const COMPUTE_F32: cublasComputeType_t = cublasComputeType_t::CUBLAS_COMPUTE_32F;
const TRANSPOSE_A: cublasLtMatmulDescAttributes_t =
    cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
/// `CUBLAS_OP_T`, which cudarc defines in the bindings of cuBLAS, not of cuBLASLt.
const OPERATION_TRANSPOSE: i32 = 1;
const EPILOGUE: cublasLtMatmulDescAttributes_t =
    cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_EPILOGUE;
const BIAS_POINTER: cublasLtMatmulDescAttributes_t =
    cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
const EPILOGUE_BIAS: cublasLtEpilogue_t = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
const PREFERRED_WORKSPACE: cublasLtMatmulPreferenceAttributes_t =
    cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
const PREFERRED_REDUCTION: cublasLtMatmulPreferenceAttributes_t =
    cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
/// Partial sums of split products are added in f32, so that a result is rounded once.
const REDUCE_IN_F32: u32 = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

impl Matmul {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let library =
            gpu.device.libraries().cublaslt.as_ref().map_err(|e| DeviceError::from(e.clone()))?.functions;
        gpu.device.bind()?;
        let workspace = gpu.keep(WORKSPACE)?;
        let mut handle = ptr::null_mut();
        // SAFETY: a context is current, the pointer is to a live handle.
        let code = unsafe { foreign!(cublaslt, library.cublasLtCreate(&raw mut handle)) };
        check(&library, "cublasLtCreate", code)?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            library,
            handle: LibraryHandle(handle),
            workspace,
            plans: Mutex::default(),
        })
    }

    /// Enqueues a product.
    ///
    /// # Safety
    /// The operands have the sizes and types of the problem, are aligned to 16 bytes, and are used by other work only in the
    /// order of the stream; `bias` is present if and only if the problem has one.
    pub(super) unsafe fn run(&self, problem: Problem, operands: Operands) -> Result<()> {
        self.gpu.device.bind()?;
        let mut plans = lock(&self.plans);
        let plan = match plans.entry(problem) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.plan(problem)?),
        };
        if let Some(bias) = operands.bias {
            self.set(plan.product, BIAS_POINTER, &bias)?;
        }
        let (one, zero) = (1.0f32, 0.0f32);
        let [w, x, out] = plan.layouts;
        // SAFETY: the plan's handles are alive; factors are host floats, read during the call; operands are the caller's promise.
        // C is D, and is not read, because its factor is zero.
        let code = unsafe {
            foreign!(
                cublaslt,
                self.library.cublasLtMatmul(
                    self.handle.0,
                    plan.product,
                    (&raw const one).cast(),
                    operands.w as _,
                    w,
                    operands.x as _,
                    x,
                    (&raw const zero).cast(),
                    operands.out as _,
                    out,
                    operands.out as _,
                    out,
                    &raw const plan.algorithm,
                    self.workspace.address() as _,
                    self.workspace.bytes(),
                    self.gpu.device.stream().handle().cast(),
                )
            )
        };
        check(&self.library, "cublasLtMatmul", code)
    }

    /// Creates the plan of a problem. The library is column-major: a row-major matrix is the transpose of a column-major one. So
    /// the problem is stated as `outᵀ[n, m] = w[n, k] · xᵀ[k, m]`, in which `w` as the library sees it is transposed back.
    fn plan(&self, problem: Problem) -> Result<Plan> {
        let Problem { m, n, k, operands, out, bias } = problem;
        let library = &self.library;
        let mut plan = Unfinished {
            library,
            product: ptr::null_mut(),
            layouts: [ptr::null_mut(); 3],
            preference: ptr::null_mut(),
        };
        // SAFETY: here and below: pointers are to live handles, which `Unfinished` destroys on every return path.
        let code = unsafe {
            foreign!(
                cublaslt,
                library.cublasLtMatmulDescCreate(
                    &raw mut plan.product,
                    COMPUTE_F32,
                    cudaDataType_t::CUDA_R_32F
                )
            )
        };
        check(library, "cublasLtMatmulDescCreate", code)?;
        self.set(plan.product, TRANSPOSE_A, &OPERATION_TRANSPOSE)?;
        if bias {
            self.set(plan.product, EPILOGUE, &EPILOGUE_BIAS)?;
            // Any address of the right alignment is sufficient for the choice of an algorithm.
            self.set(plan.product, BIAS_POINTER, &self.workspace.address())?;
        }
        let shapes = [(operands, k, n), (operands, k, m), (out, n, m)];
        for (layout, (dtype, rows, columns)) in plan.layouts.iter_mut().zip(shapes) {
            // SAFETY: as above.
            let code = unsafe {
                foreign!(
                    cublaslt,
                    library.cublasLtMatrixLayoutCreate(
                        layout,
                        data_type(dtype)?,
                        rows as u64,
                        columns as u64,
                        rows as i64,
                    )
                )
            };
            check(library, "cublasLtMatrixLayoutCreate", code)?;
        }
        // SAFETY: as above.
        let code =
            unsafe { foreign!(cublaslt, library.cublasLtMatmulPreferenceCreate(&raw mut plan.preference)) };
        check(library, "cublasLtMatmulPreferenceCreate", code)?;
        let prefer = |attribute, value: *const c_void, size| {
            // SAFETY: the value is alive during the call and has the given size.
            let code = unsafe {
                foreign!(
                    cublaslt,
                    library.cublasLtMatmulPreferenceSetAttribute(plan.preference, attribute, value, size)
                )
            };
            check(library, "cublasLtMatmulPreferenceSetAttribute", code)
        };
        let (workspace, reduction) = (self.workspace.bytes() as u64, REDUCE_IN_F32);
        prefer(PREFERRED_WORKSPACE, (&raw const workspace).cast(), size_of::<u64>())?;
        prefer(PREFERRED_REDUCTION, (&raw const reduction).cast(), size_of::<u32>())?;

        let mut best = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut found = 0;
        let [w, x, d] = plan.layouts;
        // SAFETY: all handles are alive; there is room for the one result that is requested.
        let code = unsafe {
            foreign!(
                cublaslt,
                library.cublasLtMatmulAlgoGetHeuristic(
                    self.handle.0,
                    plan.product,
                    w,
                    x,
                    d,
                    d,
                    plan.preference,
                    1,
                    best.as_mut_ptr(),
                    &raw mut found,
                )
            )
        };
        check(library, "cublasLtMatmulAlgoGetHeuristic", code)?;
        // SAFETY: zeroed, or filled by the library. The state is read as an integer, as in the library, which may define more
        // states than the enumeration.
        let (state, algorithm) = unsafe {
            let best = best.as_ptr();
            ((&raw const (*best).state).cast::<u32>().read(), (&raw const (*best).algo).read())
        };
        if found == 0 || state != 0 {
            return Err(DeviceError::Invalid(format!("cuBLASLt has no way to compute {problem:?}")).into());
        }
        Ok(plan.finish(algorithm))
    }

    fn set<T>(
        &self,
        product: cublasLtMatmulDesc_t,
        attribute: cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<()> {
        let value: *const T = value;
        // SAFETY: the handle is alive; the value is read during the call and has the given size.
        let code = unsafe {
            foreign!(
                cublaslt,
                self.library.cublasLtMatmulDescSetAttribute(product, attribute, value.cast(), size_of::<T>())
            )
        };
        check(&self.library, "cublasLtMatmulDescSetAttribute", code)
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        let plans = std::mem::take(&mut *lock(&self.plans));
        for plan in plans.into_values() {
            destroy(&self.library, plan.product, plan.layouts);
        }
        if self.gpu.device.bind().is_ok() {
            // SAFETY: created in `new`, destroyed once.
            let _ = unsafe { foreign!(cublaslt, self.library.cublasLtDestroy(self.handle.0)) };
        }
    }
}

/// A plan that is not complete.
struct Unfinished<'a> {
    library: &'a CublasLt,
    product: cublasLtMatmulDesc_t,
    layouts: [cublasLtMatrixLayout_t; 3],
    preference: cublasLtMatmulPreference_t,
}

impl Unfinished<'_> {
    fn finish(mut self, algorithm: cublasLtMatmulAlgo_t) -> Plan {
        let product = std::mem::replace(&mut self.product, ptr::null_mut());
        let layouts = std::mem::replace(&mut self.layouts, [ptr::null_mut(); 3]);
        Plan { product, layouts, algorithm }
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        destroy(self.library, self.product, self.layouts);
        if !self.preference.is_null() {
            // SAFETY: created by the library, destroyed once.
            let _ =
                unsafe { foreign!(cublaslt, self.library.cublasLtMatmulPreferenceDestroy(self.preference)) };
        }
    }
}

/// Destroys the handles that have been created.
fn destroy(library: &CublasLt, product: cublasLtMatmulDesc_t, layouts: [cublasLtMatrixLayout_t; 3]) {
    if !product.is_null() {
        // SAFETY: created by the library, destroyed once.
        let _ = unsafe { foreign!(cublaslt, library.cublasLtMatmulDescDestroy(product)) };
    }
    for layout in layouts.into_iter().filter(|l| !l.is_null()) {
        // SAFETY: as above.
        let _ = unsafe { foreign!(cublaslt, library.cublasLtMatrixLayoutDestroy(layout)) };
    }
}

fn check(library: &CublasLt, call: &str, code: i32) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: any code is accepted; the result is constant text, or null.
    let words = unsafe {
        let text = foreign!(cublaslt, library.cublasLtGetStatusString(code code));
        if text.is_null() { "" } else { std::ffi::CStr::from_ptr(text).to_str().unwrap_or_default() }
    };
    Err(DeviceError::Invalid(format!("{call} failed with cuBLAS status {code} ({words})")).into())
}
