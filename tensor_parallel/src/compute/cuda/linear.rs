//! Products with weights. With fast numerics our own kernels compute those of up to 32 rows on Hopper's tensor cores, and of one row
//! elsewhere; cuBLASLt computes the others. With invariant numerics all are ours.

#![expect(unsafe_code, reason = "a kernel and cuBLASLt are given addresses; each call says what was checked")]

use std::ops::Range;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::DType;

use super::Cuda;
use super::gemm::{Product, leaves_of_any_size};
use super::kernels::{Kernels, Source};
use super::launch::{MOST_BLOCKS_Y, to_u32};
use super::matmul::{Operands, Problem};
use super::skinny::MOST_ROWS;
use crate::compute::{Compute as _, shapes};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Threads of a block, as in `vector.cu`.
const VECTOR_THREADS: u32 = 128;
/// Rows of `x` whose products of parts are in memory at once.
const ROWS_OF_LEAVES: usize = 512;
/// The maximum number of rows for which our kernel is faster than cuBLASLt.
const FASTER_ROWS: usize = 32;

impl Cuda {
    /// Computes `x · weightᵀ + bias`, in type `out`.
    pub(super) fn multiply(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        out: DType,
    ) -> Result<Tensor> {
        let [m, k, n] = shapes::linear(x, weight, bias)?;
        let mut converted = None;
        let bias = bias.map(|bias| self.converted(bias, DType::F32, &mut converted)).transpose()?;
        if m == 0 || n == 0 || k == 0 {
            let mut y = self.zeros(&[m, n], out)?;
            bias.map_or(Ok(()), |bias| self.kernels.add(&mut y, bias))?;
            return Ok(y);
        }
        let ours = self.multiply_ourselves(x, weight, bias, (false, out))?;
        // SAFETY: the shapes were checked above, and the bias is `f32`.
        ours.map_or_else(|| unsafe { self.multiply_rows(x, weight, bias, out) }, Ok)
    }

    /// Computes `silu(gate) × up` of `x · weightᵀ + bias`, each row of which is gate, then up.
    pub(super) fn multiply_gated(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let [m, k, n] = shapes::linear(x, weight, bias)?;
        if m > 0 && k > 0 && n > 0 && n.is_multiple_of(2) {
            let mut converted = None;
            let bias = bias.map(|bias| self.converted(bias, DType::F32, &mut converted)).transpose()?;
            if let Some(y) = self.multiply_ourselves(x, weight, bias, (true, x.dtype()))? {
                return Ok(y);
            }
        }
        self.swiglu(&self.multiply(x, weight, bias, x.dtype())?)
    }

    /// Computes the products of the parts of `x`, and rounds their sum as a tree to `out`.
    pub(super) fn multiply_leaves(
        &self,
        x: &Tensor,
        weight: &Tensor,
        leaves: usize,
        out: DType,
    ) -> Result<Tensor> {
        let [m, k, n] = shapes::linear_of_leaves(x, weight, leaves)?;
        if m == 0 || k == 0 || n == 0 {
            return self.zeros(&[m, n], out);
        }
        let mut y = self.scratch(&[m, n], out)?;
        if self.has_gemm(x, weight, leaves) {
            self.multiply_on_tensor_cores(
                Product { x, weight, bias: None, leaves, is_gated: false },
                &mut y,
            )?;
            return Ok(y);
        }
        for first in (0..m).step_by(ROWS_OF_LEAVES) {
            let rows = first..m.min(first + ROWS_OF_LEAVES);
            let mut terms = self.scratch(&[leaves * rows.len(), n], DType::F32)?;
            self.kernels.matrix_vector((x, rows.clone()), weight, None, leaves, &mut terms)?;
            self.kernels.sum_of_leaves(&terms.reshape(&[leaves, rows.len(), n])?, &mut y, first)?;
        }
        Ok(y)
    }

    /// Computes a product with one of our own kernels. Returns `None` if cuBLASLt is faster, or if the product is gated and the tensor
    /// cores do not apply. With invariant numerics a product that is not gated is always ours, and a row of the result depends on that row
    /// of `x` alone.
    fn multiply_ourselves(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        (is_gated, out): (bool, DType),
    ) -> Result<Option<Tensor>> {
        let (m, is_invariant) = (x.rows(), self.numerics == Numerics::Invariant);
        let leaves = match self.numerics {
            Numerics::Fast => self.leaves_for_speed(x, weight),
            // Neither depends on the number of ranks.
            Numerics::Invariant if is_gated || bias.is_some() => 1,
            Numerics::Invariant => leaves_of_any_size(x.columns()),
        };
        let has_gemm = self.has_gemm(x, weight, leaves) && (is_invariant || m <= FASTER_ROWS);
        if !has_gemm && (is_gated || (!is_invariant && m != 1)) {
            return Ok(None);
        }
        let outputs = if is_gated { weight.rows() / 2 } else { weight.rows() };
        let mut y = self.scratch(&[m, outputs], out)?;
        if has_gemm {
            self.multiply_on_tensor_cores(Product { x, weight, bias, leaves, is_gated }, &mut y)?;
        } else {
            self.kernels.matrix_vector((x, 0..m), weight, bias, 1, &mut y)?;
        }
        Ok(Some(y))
    }

    /// Computes a product with the kernel for its number of rows.
    fn multiply_on_tensor_cores(&self, product: Product<'_>, out: &mut Tensor) -> Result<()> {
        if product.x.rows() <= MOST_ROWS {
            self.kernels.skinny(product, out)
        } else {
            self.kernels.gemm(product, out, &self.arrivals)
        }
    }

    /// Computes a product of several rows with cuBLASLt.
    ///
    /// # Safety
    /// The operands have the shapes of [`shapes::linear`], and the bias is `f32`.
    unsafe fn multiply_rows(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        out: DType,
    ) -> Result<Tensor> {
        let (m, k, n) = (x.rows(), x.columns(), weight.rows());
        let (mut wide_x, mut wide_w) = (None, None);
        let operands = if x.dtype() == weight.dtype() { x.dtype() } else { DType::F32 };
        let x = self.converted(x, operands, &mut wide_x)?;
        let weight = self.converted(weight, operands, &mut wide_w)?;
        // The library only adds a bias of the result's type, but ours are f32 and must not be rounded before the addition.
        let direct = out == DType::F32 || (out == operands && bias.is_none());
        let mut y = self.scratch(&[m, n], if direct { out } else { DType::F32 })?;
        let address = |tensor| Ok::<_, Error>(self.kernels.here(tensor)?.address());
        let problem = Problem { m, n, k, operands, out: y.dtype(), bias: bias.is_some() };
        let bias = bias.map(address).transpose()?;
        let operands =
            Operands { x: address(x)?, w: address(weight)?, bias, out: self.kernels.address_mut(&mut y)? };
        // SAFETY: all are tensors of the problem's shapes and types on this device, aligned to 256 bytes, by the caller's promise; a
        // bias comes with an f32 result. They are borrowed until the product is enqueued, the result exclusively, and used in the
        // order of the device's stream.
        unsafe { self.matmul.run(problem, operands) }?;
        if direct { Ok(y) } else { self.kernels.convert(&y, out) }
    }

    /// Returns the tensor itself if it has this type; otherwise converts it into `held`.
    fn converted<'a>(&self, x: &'a Tensor, dtype: DType, held: &'a mut Option<Tensor>) -> Result<&'a Tensor> {
        if x.dtype() == dtype {
            return Ok(x);
        }
        Ok(held.insert(self.kernels.convert(x, dtype)?))
    }
}

impl Kernels {
    /// Computes the products of some rows of `x` with the kernel of `vector.cu`, each row on its own. The products of parts stay apart:
    /// `out` is `[leaves, rows, n]`, and the weight has the rows for each part in turn.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, or the bias is not `f32`.
    fn matrix_vector(
        &self,
        (x, rows): (&Tensor, Range<usize>),
        matrix: &Tensor,
        bias: Option<&Tensor>,
        leaves: usize,
        out: &mut Tensor,
    ) -> Result<()> {
        let (m, n, k) = (rows.len(), matrix.rows() / leaves, matrix.columns());
        let fits = [matrix.rows(), x.columns()] == [leaves * n, leaves * k] && out.count() == leaves * m * n;
        if !fits || rows.end > x.rows() {
            return Err(Error::shape_mismatch("product", matrix, x));
        }
        if let Some(bias) = bias.filter(|b| b.count() != n || b.dtype() != DType::F32) {
            return Err(Error::shape_mismatch("bias", matrix, bias));
        }
        // A thread has up to eight loads in flight. A row of one or two steps is too short for them, so a block takes four rows.
        let step = VECTOR_THREADS as usize * 16 / x.dtype().size().max(matrix.dtype().size());
        let of_block = if k > 2 * step { 2 } else { 4 };
        let source = Source::Vector(x.dtype(), matrix.dtype(), out.dtype(), of_block);
        let sizes = [to_u32("rows", n)?, to_u32("columns", k)?, u32::from(self.here(matrix)?.is_settled())];
        let stride = to_u32("columns", x.columns())?;
        for leaf in 0..leaves {
            for first in (0..m).step_by(MOST_BLOCKS_Y as usize) {
                let mut call = self.call(source, "matrix_vector");
                call.read_from(x, rows.start + first)?
                    .read_from(matrix, leaf * n)?
                    .read_optional(bias)?
                    .write_from(out, leaf * m + first)?;
                for size in sizes {
                    call.value(size);
                }
                call.value(stride).value((leaf * k) as u64);
                let vectors = (m - first).min(MOST_BLOCKS_Y as usize) as u32;
                // SAFETY: a block reads the `k` elements of one of `vectors` rows of `x` from `leaf × k` on, `of_block` of the leaf's
                // `n` rows of the matrix, and as many floats of the bias unless it is null. It writes as many elements of that row of
                // the leaf in `out`: checked above. It reads the matrix before the previous kernel has ended only if no kernel has
                // written it.
                unsafe { call.launch([n.div_ceil(of_block as usize) as u32, vectors], VECTOR_THREADS) }?;
            }
        }
        Ok(())
    }
}
