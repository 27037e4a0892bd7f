//! Arithmetic on one GPU: our own kernels, compiled at run time, and cuBLASLt for products of matrices.
//!
//! Everything is enqueued on the device's one stream, in the order of the calls, and so are the collectives of a group on
//! that device, but for asynchronous ones. Only reading values waits.

mod attend;
mod core;
mod kernels;
mod launch;
mod matmul;
mod record;

use std::ops::Range;

use ryzanstein_process_group::DType;

pub use self::core::Cuda;
use self::core::{shapes, small};
use self::kernels::Source;
use self::launch::Arguments;
use super::batch::{Batch, DeviceBatch, SlotMapping};
use super::operations::{AttentionCall, Compute, LayerCache, Recording};
use crate::error::{Error, Result};
use crate::gpu::DeviceArray;
use crate::rotary::Rotary;
use crate::tensor::Tensor;

impl Cuda {
    /// Copies a tensor to the device, or gives it back if it is there.
    ///
    /// # Errors
    /// When the device fails.
    pub fn upload(&self, tensor: Tensor) -> Result<Tensor> {
        use ryzanstein_process_group::Buffer as _;
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
        let count: usize = shape.iter().product();
        let mut block = self.gpu.keep(count * dtype.size())?;
        block.clear()?;
        Ok(Tensor::from_device(shape, DeviceArray::new(block, dtype, count)))
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Ok(self.tensor(shape, dtype)?.0)
    }

    fn batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch> {
        let (rows, half) = (tokens.len(), rotary.frequencies().len());
        let state = self.gpu.scratch((3 * rows + half) * size_of::<u32>())?;
        let rotations = self.gpu.scratch(rows * half * 2 * size_of::<f32>())?;
        let mut batch = Batch::on_device(tokens, slots, half, DeviceBatch { state, rotations })?;
        self.update_batch(&mut batch, tokens, slots, rotary)?;
        Ok(batch)
    }

    fn update_batch(
        &self,
        batch: &mut Batch,
        tokens: &[u32],
        slots: &SlotMapping,
        rotary: &Rotary,
    ) -> Result<()> {
        self.place(batch)?;
        let (rows, frequencies) = (tokens.len(), rotary.frequencies());
        batch.replace(tokens, slots, frequencies.len())?;
        let row = |row| slots.slot(row);
        let positions = (0..rows).map(|r| small("positions", row(r).1));
        let sequences = (0..rows).map(|r| small("sequences", row(r).0));
        let mut words = positions.chain(sequences).collect::<Result<Vec<u32>>>()?;
        words.extend_from_slice(tokens);
        words.extend(frequencies.iter().map(|f| f.to_bits()));
        let DeviceBatch { state, rotations } = batch.device_mut()?;
        state.write(bytemuck::cast_slice(&words))?;
        let half = small("frequencies", frequencies.len())?;
        let mut arguments = Arguments::default();
        let behind = 3 * rows * size_of::<u32>();
        arguments
            .push(state.address() + behind as u64)
            .push(state.address())
            .push(rotations.address())
            .push(half);
        let threads = half.next_multiple_of(32).min(256);
        let source = Source::Rows(DType::F32, DType::F32);
        self.kernels.blocks(source, "rotations", [small("rows", rows)?, 1], threads, &arguments)
    }

    #[expect(unsafe_code, reason = "a graph keeps addresses")]
    unsafe fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn Recording>>> {
        // SAFETY: by the caller's promise.
        Ok(Some(Box::new(unsafe { record::Recorded::new(&self.gpu, work) }?)))
    }

    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor> {
        let (m, k, n) = (x.rows(), x.columns(), weight.rows());
        if weight.columns() != k {
            return Err(shapes("linear", x, weight));
        }
        if let Some(bias) = bias.filter(|b| b.count() != n) {
            return Err(shapes("bias", weight, bias));
        }
        let mut room = None;
        let bias = bias.map(|bias| self.converted(bias, DType::F32, &mut room)).transpose()?;
        if m == 0 || n == 0 || (k == 0 && bias.is_none()) {
            return self.zeros(&[m, n], out);
        }
        if m > 1 && k > 0 {
            return self.product(x, weight, bias, out);
        }
        if m > 1 {
            let mut y = self.zeros(&[m, n], out)?;
            if let Some(bias) = bias {
                self.add_rows(&mut y, bias)?;
            }
            return Ok(y);
        }
        let (y, to) = self.tensor(&[1, n], out)?;
        let bias = bias.map(|b| self.address(b)).transpose()?.unwrap_or(0);
        let mut arguments = Arguments::default();
        arguments.push(self.address(x)?).push(self.address(weight)?).push(bias).push(to);
        arguments.push(small("rows", n)?).push(small("columns", k)?);
        let source = Source::Vector(x.dtype(), weight.dtype(), out);
        self.kernels.blocks(
            source,
            "matrix_vector",
            [n.div_ceil(launch::VECTOR_ROWS) as u32, 1],
            launch::VECTOR_THREADS,
            &arguments,
        )?;
        Ok(y)
    }

    fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor> {
        let (rows, columns) = (table.rows(), table.columns());
        let count = batch.tokens().len();
        let (y, to) = self.tensor(&[count, columns], out)?;
        let mut arguments = Arguments::default();
        arguments.push(self.address(table)?).push(small("rows", first)?).push(small("rows", rows)?);
        arguments.push(small("columns", columns)?).push(self.place(batch)?.state.address()).push(to);
        let threads = columns.next_multiple_of(32).clamp(32, 256) as u32;
        self.kernels.blocks(
            Source::Rows(out, table.dtype()),
            "embed",
            [count as u32, 1],
            threads,
            &arguments,
        )?;
        Ok(y)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
        let columns = x.columns();
        if weight.count() != columns {
            return Err(shapes("norm", x, weight));
        }
        let (y, to) = self.tensor(x.shape(), x.dtype())?;
        let mut arguments = Arguments::default();
        arguments.push(self.address(x)?).push(self.address(weight)?).push(to);
        arguments.push(small("columns", columns)?).push(epsilon);
        // One vector of four a thread where the row is short enough.
        let threads = columns.div_ceil(4).next_multiple_of(32).clamp(32, 1024) as u32;
        let rows = small("rows", x.rows())?;
        self.kernels.blocks(
            Source::Rows(x.dtype(), weight.dtype()),
            "rms_norm",
            [rows, 1],
            threads,
            &arguments,
        )?;
        Ok(y)
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        let one_row = y.shape().len() == 1 && y.count() == x.columns();
        if !one_row && y.shape() != x.shape() {
            return Err(shapes("add", x, y));
        }
        self.add_rows(x, y)
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        if !x.columns().is_multiple_of(2) {
            return Err(Error::input(format!(
                "gate and up must be equally wide; {} columns are odd",
                x.columns()
            )));
        }
        let (rows, width) = (small("rows", x.rows())?, small("columns", x.columns())? / 2);
        let (y, to) = self.tensor(&[x.rows(), width as usize], x.dtype())?;
        let mut arguments = Arguments::default();
        arguments.push(self.address(x)?).push(to).push(rows).push(width);
        let threads = 256;
        let across = (width as usize).div_ceil(16 / x.dtype().size() * threads as usize) as u32;
        let source = Source::Rows(x.dtype(), x.dtype());
        self.kernels.blocks(source, "swiglu", [across, rows.min(launch::MOST_ROWS)], threads, &arguments)?;
        Ok(y)
    }

    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor> {
        self.attend(&qkv, call, cache)
    }

    fn slice_columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        if columns.start > columns.end || columns.end > x.columns() {
            return Err(Error::input(format!("columns {columns:?} of a tensor of shape {:?}", x.shape())));
        }
        let (y, to) = self.tensor(&[x.rows(), columns.len()], x.dtype())?;
        let mut arguments = Arguments::default();
        arguments.push(self.address(x)?).push(to).push(y.count() as u64).push(small("columns", x.columns())?);
        arguments.push(small("columns", columns.start)?).push(small("columns", columns.len())?);
        self.kernels.over(Source::Rows(x.dtype(), x.dtype()), "cut_columns", y.count(), &arguments)?;
        Ok(y)
    }

    fn concat_columns(&self, blocks: Tensor, keep: usize) -> Result<Tensor> {
        let &[count, rows, width] = blocks.shape() else {
            return Err(Error::input(format!("blocks of shape {:?}", blocks.shape())));
        };
        if keep > count * width {
            return Err(Error::input(format!("{keep} columns of {count} blocks of {width}")));
        }
        if count == 1 && keep == width {
            return blocks.reshape(&[rows, width]);
        }
        let (y, to) = self.tensor(&[rows, keep], blocks.dtype())?;
        let mut arguments = Arguments::default();
        arguments.push(self.address(&blocks)?).push(to).push(y.count() as u64).push(small("rows", rows)?);
        arguments.push(small("columns", width)?).push(small("columns", keep)?);
        self.kernels.over(
            Source::Rows(blocks.dtype(), blocks.dtype()),
            "join_columns",
            y.count(),
            &arguments,
        )?;
        Ok(y)
    }
}
