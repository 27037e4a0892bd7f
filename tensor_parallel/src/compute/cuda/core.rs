//! What the operations have in common: where tensors are, and steps that several of them take.

use std::sync::Arc;

use ryzanstein_process_group::DType;
use ryzanstein_process_group::device::Device;

use super::kernels::{Kernels, Source};
use super::launch::Arguments;
use super::matmul::{Matmul, Operands, Problem};
use crate::compute::batch::{Batch, DeviceBatch};
use crate::error::{Error, Result};
use crate::gpu::{Block, DeviceArray, Gpu};
use crate::tensor::Tensor;

/// Arithmetic on one GPU.
#[derive(Debug)]
pub struct Cuda {
    // Before the memory that its plans point to.
    matmul: Matmul,
    pub(super) kernels: Kernels,
    /// Counters of blocks that have finished, zero between launches.
    pub(super) arrivals: Block,
    pub(super) gpu: Arc<Gpu>,
}

/// Counters that a launch can have: as many as the second dimension of its grid.
pub(super) const ARRIVALS: usize = 65_535;

impl Cuda {
    /// Computes on this device. What is copied there goes through host memory that up to `threads` threads fill.
    ///
    /// # Errors
    /// When cuBLASLt was not found, and when the device fails.
    pub fn new(device: &Device, threads: usize) -> Result<Self> {
        let gpu = Gpu::new(device, threads);
        let matmul = Matmul::new(&gpu)?;
        let mut arrivals = gpu.keep(ARRIVALS * size_of::<u32>())?;
        arrivals.clear()?;
        Ok(Self { matmul, kernels: Kernels::new(&gpu), arrivals, gpu })
    }

    pub(super) fn tensor(&self, shape: &[usize], dtype: DType) -> Result<(Tensor, u64)> {
        let count: usize = shape.iter().product();
        let array = DeviceArray::new(self.gpu.scratch(count * dtype.size())?, dtype, count);
        let address = array.address();
        Ok((Tensor::from_device(shape, array), address))
    }

    /// Where a tensor is, which must be here.
    pub(super) fn address(&self, tensor: &Tensor) -> Result<u64> {
        match tensor.device() {
            Some(array) if array.is_on(&self.gpu) => Ok(array.address()),
            _ => Err(Error::input(format!(
                "a tensor of shape {:?} is not in the memory of GPU {}, which is to compute with it, or belongs to another \
                 stream there; upload it first",
                tensor.shape(),
                self.gpu.device.ordinal()
            ))),
        }
    }

    /// What a batch has on the GPU, which must be here.
    pub(super) fn place<'a>(&self, batch: &'a Batch) -> Result<&'a DeviceBatch> {
        let place = batch.device()?;
        if place.state.is_on(&self.gpu) {
            return Ok(place);
        }
        Err(Error::input(format!(
            "a batch was made for another GPU than {}, or for another stream there; make it where it is used",
            self.gpu.device.ordinal()
        )))
    }

    /// `x + bias` in another type.
    fn convert(&self, x: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor> {
        let (y, to) = self.tensor(x.shape(), out)?;
        let bias = bias.map(|b| self.address(b)).transpose()?.unwrap_or(0);
        let columns = x.columns().max(1) as u64;
        let mut arguments = Arguments::default();
        arguments.push(self.address(x)?).push(bias).push(to).push(x.count() as u64).push(columns);
        self.kernels.over(Source::Rows(out, x.dtype()), "convert", x.count(), &arguments)?;
        Ok(y)
    }

    /// The tensor as it is if it has this type, else converted.
    pub(super) fn converted<'a>(
        &self,
        x: &'a Tensor,
        dtype: DType,
        room: &'a mut Option<Tensor>,
    ) -> Result<&'a Tensor> {
        if x.dtype() == dtype {
            return Ok(x);
        }
        Ok(room.insert(self.convert(x, None, dtype)?))
    }

    /// A product of at least two rows.
    pub(super) fn product(
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
        // The library adds a bias of the result's type only, and ours are f32, which must not be rounded before.
        let direct = out == DType::F32 || (out == operands && bias.is_none());
        let (y, to) = self.tensor(&[m, n], if direct { out } else { DType::F32 })?;
        let problem = Problem { m, n, k, operands, out: y.dtype(), bias: bias.is_some() };
        let bias = bias.map(|b| self.address(b)).transpose()?;
        let operands = Operands { x: self.address(x)?, w: self.address(weight)?, bias, out: to };
        #[expect(unsafe_code, reason = "addresses stand for memory")]
        // SAFETY: all are tensors of the problem's shapes and types on this device, used in the order of its stream.
        unsafe { self.matmul.run(problem, operands) }?;
        if direct { Ok(y) } else { self.convert(&y, None, out) }
    }

    /// Adds `y` to `x`, again and again where it is shorter. Its length must divide that of `x`.
    pub(super) fn add_rows(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        let mut arguments = Arguments::default();
        arguments.push(self.address(x)?).push(self.address(y)?).push(x.count() as u64).push(y.count() as u64);
        self.kernels.over(Source::Rows(x.dtype(), y.dtype()), "add", x.count(), &arguments)
    }
}

pub(super) fn shapes(what: &str, a: &Tensor, b: &Tensor) -> Error {
    Error::input(format!("{what}: shapes {:?} and {:?} do not fit", a.shape(), b.shape()))
}

/// Kernels count rows and columns with 32 bits.
pub(super) fn small(what: &str, count: usize) -> Result<u32> {
    u32::try_from(count)
        .map_err(|_| Error::input(format!("{count} {what} are more than a GPU's kernel counts")))
}
