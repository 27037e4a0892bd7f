//! Products with weights. Tensor cores compute those of 16-bit types: `skinny.cu` those of few rows, on Hopper `gemm.cu` those of more.
//! For more rows elsewhere `skinny.cu` serves invariant numerics and cuBLASLt fast ones. Other types take `simt.cu` with invariant numerics
//! and cuBLASLt with fast ones.

#![expect(unsafe_code, reason = "a kernel and cuBLASLt are given addresses; each call says what was checked")]

use ryzanstein_config::Numerics;
use ryzanstein_process_group::DType;

use super::Cuda;
use super::gemm::{FEW_ROWS, Product, Sizes, leaves_of_any_size};
use super::kernels::{Kernels, Source};
use super::launch::{MOST_BLOCKS_Y, to_u32};
use super::matmul::{Operands, Problem};
use super::skinny::MOST_ROWS;
use crate::compute::{Compute as _, shapes};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Threads of a block of `simt.cu`, and outputs of each of its warps.
const SIMT_THREADS: u32 = 128;
pub(super) const COLUMNS: usize = 4;

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
        let product = Product { x, weight, bias: None, leaves, is_gated: false };
        self.multiply_by(self.kernel_for(product), product, out)
    }

    /// Computes a product with one of our own kernels. Returns `None` if cuBLASLt is faster. With invariant numerics a product is always
    /// ours, and a row of the result depends on that row of `x` alone.
    fn multiply_ourselves(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        (is_gated, out): (bool, DType),
    ) -> Result<Option<Tensor>> {
        let leaves = match self.numerics {
            Numerics::Fast => self.leaves_for_speed(x, weight),
            // Neither depends on the number of ranks.
            Numerics::Invariant if is_gated || bias.is_some() => 1,
            Numerics::Invariant => leaves_of_any_size(x.columns()),
        };
        let product = Product { x, weight, bias, leaves, is_gated };
        let kernel = self.kernel_for(product);
        let is_ours = match (self.numerics, kernel) {
            (Numerics::Invariant, _) => true,
            (Numerics::Fast, ProductKernel::Skinny) => x.rows() <= MOST_ROWS,
            (Numerics::Fast, ProductKernel::Gemm) => x.rows() <= FEW_ROWS,
            (Numerics::Fast, ProductKernel::Simt) => false,
        };
        is_ours.then(|| self.multiply_by(kernel, product, out)).transpose()
    }

    /// Returns the kernel for a product.
    fn kernel_for(&self, product: Product<'_>) -> ProductKernel {
        let (major, _) = self.gpu.device.info().capability;
        // Older tensor cores multiply no bf16.
        if major < 8 || !product.fits_tensor_cores() {
            ProductKernel::Simt
        } else if major == 9 && product.x.rows() > MOST_ROWS {
            ProductKernel::Gemm
        } else {
            ProductKernel::Skinny
        }
    }

    /// Computes a product in type `out`.
    fn multiply_by(&self, kernel: ProductKernel, product: Product<'_>, out: DType) -> Result<Tensor> {
        let Product { x, weight, is_gated, .. } = product;
        if let (ProductKernel::Simt, true) = (kernel, is_gated) {
            return self.swiglu(&self.multiply_by(kernel, Product { is_gated: false, ..product }, out)?);
        }
        let n = weight.count() / x.columns();
        let mut y = self.scratch(&[x.rows(), if is_gated { n / 2 } else { n }], out)?;
        match kernel {
            ProductKernel::Skinny => self.kernels.skinny(product, &mut y),
            ProductKernel::Gemm => self.kernels.gemm(product, &mut y, &self.arrivals),
            ProductKernel::Simt => self.kernels.simt(product, &mut y),
        }?;
        Ok(y)
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

/// Our own kernels of products.
#[derive(Clone, Copy)]
enum ProductKernel {
    Skinny,
    Gemm,
    Simt,
}

impl Kernels {
    /// Computes a product that is not gated with `simt.cu`.
    ///
    /// # Errors
    /// Returns the errors of [`Product::sizes`].
    fn simt(&self, product: Product<'_>, out: &mut Tensor) -> Result<()> {
        let Sizes { m, n, k, row, .. } = product.sizes(out)?;
        let Product { x, weight, bias, leaves, is_gated } = product;
        assert!(!is_gated, "another kernel gates");
        let mut call = self.call(Source::Simt(x.dtype(), weight.dtype(), out.dtype(), leaves), "simt");
        call.read(x)?.read(weight)?.read_optional(bias)?.write(out)?;
        call.value([to_u32("rows", m)?, to_u32("rows", n)?, to_u32("columns", k)?, to_u32("columns", row)?]);
        let of_block = SIMT_THREADS as usize / 32 * COLUMNS;
        let grid = [n.div_ceil(of_block) as u32, m.min(MOST_BLOCKS_Y as usize) as u32];
        // SAFETY: a warp reads rows of `x` below `m`, all leaves of rows of the weights below `n`, and as many floats of the bias unless
        // it is null, and writes elements of `out` that exist: checked above.
        unsafe { call.launch(grid, SIMT_THREADS) }
    }
}
