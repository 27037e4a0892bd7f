//! Products with weights: one row with a kernel of our own, several rows with cuBLASLt.

#![expect(unsafe_code, reason = "a kernel and cuBLASLt are given addresses; each call says what was checked")]

use ryzanstein_process_group::DType;

use super::Cuda;
use super::kernels::{Kernels, Source};
use super::launch::to_u32;
use super::matmul::{Operands, Problem};
use crate::compute::{Compute as _, shapes};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Threads of a block, as in `vector.cu`.
const VECTOR_THREADS: u32 = 128;
const VECTOR_ROWS: usize = 2;

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
        if m == 0 || n == 0 || (k == 0 && bias.is_none()) {
            return self.zeros(&[m, n], out);
        }
        if m == 1 {
            let mut y = self.scratch(&[1, n], out)?;
            self.kernels.matrix_vector(x, weight, bias, false, &mut y)?;
            return Ok(y);
        }
        if k > 0 {
            return self.multiply_rows(x, weight, bias, out);
        }
        let mut y = self.zeros(&[m, n], out)?;
        if let Some(bias) = bias {
            self.kernels.add(&mut y, bias)?;
        }
        Ok(y)
    }

    /// Computes `silu(gate) × up` of `x · weightᵀ + bias`, each row of which is gate, then up.
    pub(super) fn multiply_gated(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let [m, k, n] = shapes::linear(x, weight, bias)?;
        if m != 1 || k == 0 || n == 0 || !n.is_multiple_of(VECTOR_ROWS) {
            return self.swiglu(&self.multiply(x, weight, bias, x.dtype())?);
        }
        let mut converted = None;
        let bias = bias.map(|bias| self.converted(bias, DType::F32, &mut converted)).transpose()?;
        let mut y = self.scratch(&[1, n / 2], x.dtype())?;
        self.kernels.matrix_vector(x, weight, bias, true, &mut y)?;
        Ok(y)
    }

    /// Computes a product of several rows with an `f32` bias.
    fn multiply_rows(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        out: DType,
    ) -> Result<Tensor> {
        let (m, n) = (x.rows(), weight.rows());
        let (mut wide_x, mut wide_w) = (None, None);
        let operands = if x.dtype() == weight.dtype() { x.dtype() } else { DType::F32 };
        let x = self.converted(x, operands, &mut wide_x)?;
        let weight = self.converted(weight, operands, &mut wide_w)?;
        // The library only adds a bias of the result's type, but ours are f32 and must not be rounded before the addition.
        let direct = out == DType::F32 || (out == operands && bias.is_none());
        let mut y = self.scratch(&[m, n], if direct { out } else { DType::F32 })?;
        self.matrix_product(x, weight, bias, &mut y)?;
        if direct { Ok(y) } else { self.convert(&y, out) }
    }

    /// Computes `out = x · weightᵀ + bias` with cuBLASLt.
    ///
    /// # Errors
    /// Returns an error if shapes or types do not fit: both operands must have the same type, and the bias that of the result.
    fn matrix_product(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result<()> {
        let (m, k, n) = (x.rows(), x.columns(), weight.rows());
        if weight.columns() != k || weight.dtype() != x.dtype() {
            return Err(Error::shape_mismatch("matrix product", x, weight));
        }
        if (out.rows(), out.columns()) != (m, n) {
            return Err(Error::shape_mismatch("matrix product", x, out));
        }
        if let Some(bias) = bias.filter(|b| b.count() != n || b.dtype() != out.dtype()) {
            return Err(Error::shape_mismatch("bias", weight, bias));
        }
        let address = |tensor| Ok::<_, Error>(self.kernels.here(tensor)?.address());
        let problem = Problem { m, n, k, operands: x.dtype(), out: out.dtype(), bias: bias.is_some() };
        let bias = bias.map(address).transpose()?;
        let operands =
            Operands { x: address(x)?, w: address(weight)?, bias, out: self.kernels.address_mut(out)? };
        // SAFETY: all are tensors of the problem's shapes and types, checked above, on this device and aligned to 256 bytes. They
        // are borrowed until the product is enqueued, the result exclusively, and used in the order of the device's stream.
        unsafe { self.matmul.run(problem, operands) }
    }

    /// Converts values to another type.
    fn convert(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let mut y = self.scratch(x.shape(), dtype)?;
        self.kernels.convert(x, &mut y)?;
        Ok(y)
    }

    /// Returns the tensor itself if it has this type; otherwise converts it into `held`.
    fn converted<'a>(&self, x: &'a Tensor, dtype: DType, held: &'a mut Option<Tensor>) -> Result<&'a Tensor> {
        if x.dtype() == dtype {
            return Ok(x);
        }
        Ok(held.insert(self.convert(x, dtype)?))
    }
}

impl Kernels {
    /// Computes `out[n] = matrix[n, k] · x[k] + bias[n]` with the kernel of `vector.cu`. If `is_gated`, the first half of these are
    /// gates, and `out[n / 2] = silu(gate) × up`.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, or the bias is not `f32`.
    fn matrix_vector(
        &self,
        x: &Tensor,
        matrix: &Tensor,
        bias: Option<&Tensor>,
        is_gated: bool,
        out: &mut Tensor,
    ) -> Result<()> {
        let (n, k) = (matrix.rows(), matrix.columns());
        let outputs = if is_gated { n / VECTOR_ROWS } else { n };
        if x.count() != k || out.count() != outputs || (is_gated && outputs * VECTOR_ROWS != n) {
            return Err(Error::shape_mismatch("product", matrix, x));
        }
        if let Some(bias) = bias.filter(|b| b.count() != n || b.dtype() != DType::F32) {
            return Err(Error::shape_mismatch("bias", matrix, bias));
        }
        let source = Source::Vector(x.dtype(), matrix.dtype(), out.dtype());
        let mut call = self.call(source, "matrix_vector");
        call.read(x)?.read(matrix)?.read_optional(bias)?.write(out)?;
        call.value(to_u32("rows", n)?).value(to_u32("columns", k)?).value(u32::from(is_gated));
        call.value(u32::from(self.here(matrix)?.is_settled()));
        // SAFETY: a block reads all `k` elements of `x`, VECTOR_ROWS of the matrix's `n` rows of `k`, and as many floats of
        // the bias unless it is null, and writes as many elements of `out`, or one if it is gated: checked above. It reads the
        // matrix before the previous kernel has ended only if no kernel has written it.
        unsafe { call.launch([n.div_ceil(VECTOR_ROWS) as u32, 1], VECTOR_THREADS) }
    }
}
