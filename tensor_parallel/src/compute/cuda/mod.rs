//! Arithmetic on one GPU: our own kernels, compiled at run time, and cuBLASLt for matrix products.
//!
//! All operations, and all synchronous collectives of a group on the device, are enqueued on one stream in the order of the
//! calls. Only reading values waits.

mod attention;
mod batch;
mod gemm;
mod kernels;
mod launch;
mod linear;
mod matmul;
mod rows;
mod skinny;

use std::ops::Range;
use std::sync::Arc;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::device::Device;
use ryzanstein_process_group::{Buffer as _, DType};

use self::attention::ARRIVALS;

use self::kernels::Kernels;
use self::matmul::{Matmul, WORKSPACE};
use super::batch::{Batch, SlotMapping};
use super::captured_graph::CapturedGraph;
use super::operations::{AttentionCall, Compute, LayerCache};
use super::shapes;
use crate::error::Result;
use crate::gpu::{Block, DeviceArray, Gpu};
use crate::rotary::Rotary;
use crate::tensor::{Tensor, element_count};

/// Fixed memory of every [`Cuda`], in bytes.
pub(crate) const FIXED_BYTES: usize = WORKSPACE + ARRIVALS * size_of::<u32>();

/// Arithmetic on one GPU.
#[derive(Debug)]
pub struct Cuda {
    // Dropped before the memory that its plans point to.
    matmul: Matmul,
    kernels: Kernels,
    /// Counters of finished blocks, which are zero between launches.
    arrivals: Block,
    gpu: Arc<Gpu>,
    numerics: Numerics,
}

impl Cuda {
    /// Computes on `device`. Up to `threads` threads fill the host memory from which weights are copied to the device.
    ///
    /// All computation on a device shares one stream, whichever thread enqueues it.
    ///
    /// # Errors
    /// Returns an error if cuBLASLt is not found or the device fails.
    pub fn new(device: &Device, threads: usize) -> Result<Self> {
        Self::with_numerics(device, threads, Numerics::Fast)
    }

    /// Computes as [`new`](Self::new) does, with these numerics.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    pub fn with_numerics(device: &Device, threads: usize, numerics: Numerics) -> Result<Self> {
        let gpu = Gpu::new(device, threads);
        let matmul = Matmul::new(&gpu)?;
        let mut arrivals = gpu.keep(ARRIVALS * size_of::<u32>())?;
        arrivals.clear()?;
        Ok(Self { matmul, kernels: Kernels::new(&gpu), arrivals, gpu, numerics })
    }

    /// Copies a tensor to the device. Returns a tensor unchanged if it is already there.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn upload(&self, tensor: Tensor) -> Result<Tensor> {
        if tensor.device().is_some() {
            return Ok(tensor);
        }
        let mut there = self.zeros(tensor.shape(), tensor.dtype())?;
        let bytes = tensor.view().host()?;
        let width = tensor.columns() * tensor.dtype().size();
        there.fill_rows(0, tensor.rows(), &|rows, to| {
            to.copy_from_slice(&bytes[rows.start * width..rows.end * width]);
        })?;
        Ok(there)
    }
}

impl Compute for Cuda {
    fn weight_dtype(&self, _: DType, activations: DType) -> DType {
        activations
    }

    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let count = element_count(shape, dtype)?;
        let mut block = self.gpu.keep(count * dtype.size())?;
        block.clear()?;
        Ok(Tensor::from_device(shape, DeviceArray::new(block, dtype, count)))
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.kernels.scratch(shape, dtype)
    }

    fn batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch> {
        self.new_batch(tokens, slots, rotary)
    }

    fn update_batch(
        &self,
        batch: &mut Batch,
        tokens: &[u32],
        slots: &SlotMapping,
        rotary: &Rotary,
    ) -> Result<()> {
        self.set_batch(batch, tokens, slots, rotary)
    }

    #[expect(unsafe_code, reason = "a graph keeps addresses")]
    unsafe fn capture(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<CapturedGraph>> {
        // SAFETY: by the caller's promise.
        Ok(Some(unsafe { CapturedGraph::new(&self.gpu, work) }?))
    }

    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor> {
        self.multiply(x, weight, bias, out)
    }

    fn numerics(&self) -> Numerics {
        self.numerics
    }

    fn linear_of_leaves(&self, x: &Tensor, weight: &Tensor, leaves: usize, out: DType) -> Result<Tensor> {
        self.multiply_leaves(x, weight, leaves, out)
    }

    fn sum_of_leaves(&self, terms: &Tensor, out: DType) -> Result<Tensor> {
        self.kernels.sum_of_leaves(terms, out)
    }

    fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor> {
        self.kernels.embed(table, first, batch, out)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
        self.kernels.rms_norm(x, weight, epsilon)
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        shapes::add(x, y)?;
        self.kernels.add(x, y)
    }

    fn add_norm(&self, x: &mut Tensor, y: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
        self.kernels.add_norm(x, y, weight, epsilon)
    }

    fn gated_linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        self.multiply_gated(x, weight, bias)
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        self.kernels.swiglu(x)
    }

    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor> {
        self.attend(qkv, call, cache)
    }

    fn select_columns(&self, blocks: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        self.kernels.select_columns(blocks, columns)
    }

    fn argmax(&self, x: &Tensor, tokens: Range<usize>) -> Result<Tensor> {
        self.kernels.argmax(x, &tokens)
    }

    fn choose_tokens(&self, batch: &mut Batch, candidates: &Tensor) -> Result<()> {
        self.kernels.choose(batch, candidates)
    }
}
