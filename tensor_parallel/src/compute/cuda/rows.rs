//! The kernels of `rows.cu`, which process each element or row independently.

#![expect(unsafe_code, reason = "each kernel is launched here, and each launch says what was checked")]

use std::ops::Range;

use ryzanstein_process_group::DType;

use super::kernels::{Kernels, Source};
use super::launch::{KernelCall, MOST_BLOCKS_Y, to_u32};
use crate::argmax;
use crate::checkpoint::LEAVES;
use crate::compute::batch::{Batch, DeviceBatch, Part, SlotMapping};
use crate::compute::operations::HeadNorms;
use crate::compute::shapes;
use crate::error::{Error, Result};
use crate::rotary::Rotary;
use crate::tensor::Tensor;

/// Columns of a part of a row of logits.
pub(super) const PART: usize = 2048;
/// Threads that compare the logits of a part.
pub(super) const PART_THREADS: u32 = 256;

/// Returns the number of threads that normalise a row: one for each 16 bytes of the wider type, at most 1024.
fn norm_threads(x: &Tensor, weight: &Tensor) -> u32 {
    let elements = 16 / x.dtype().size().max(weight.dtype().size());
    x.columns().div_ceil(elements).next_multiple_of(32).clamp(32, 1024) as u32
}

impl Kernels {
    /// Returns rows `ids[i] - first` of the table in type `out`, for the ids of a batch. Ids that the table does not have give zeros.
    ///
    /// # Errors
    /// Returns an error if the batch is in other memory.
    pub(super) fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor> {
        let (count, columns) = (batch.tokens().len(), table.columns());
        let mut y = self.scratch(&[count, columns], out)?;
        let (state, ids) = (&batch.device()?.state, batch.slots().state_words() * size_of::<u32>());
        assert!(state.bytes() >= ids + count * size_of::<u32>(), "a batch has the ids of all its tokens");
        let (grid, rows) = (to_u32("tokens", count)?, to_u32("rows", table.rows())?);
        let threads = columns.next_multiple_of(32).clamp(32, 256) as u32;
        let mut call = self.call(Source::Rows(out, table.dtype()), "embed");
        call.read(table)?.value(to_u32("rows", first)?).value(rows).value(to_u32("columns", columns)?);
        call.block(state, ids)?.write(&mut y)?;
        // SAFETY: a block reads one id of the batch, a row of `columns` elements of the table if it has that row, and writes a row of
        // `y`. The types are those of the source.
        unsafe { call.launch([grid, 1], threads) }?;
        Ok(y)
    }

    /// Computes `x += y`, with `y` repeated along `x`.
    ///
    /// # Errors
    /// Returns an error if the length of `y` does not divide that of `x`.
    pub(super) fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        let (count, period) = (x.count(), y.count());
        if count == 0 {
            return Ok(());
        }
        if period == 0 || !count.is_multiple_of(period) {
            return Err(Error::shape_mismatch("add", x, y));
        }
        let mut call = self.call(Source::Rows(x.dtype(), y.dtype()), "add");
        call.write(x)?.read(y)?.value(count as u64).value(period as u64);
        // SAFETY: the kernel reads and writes `count` elements of `x` and reads `period` elements of `y`, which is their whole
        // length.
        unsafe { call.launch_over(count) }
    }

    /// Adds terms `[count, rows, columns]` as a [tree](crate::shard::split_leaves), and rounds them once to type `out`.
    ///
    /// # Errors
    /// Returns an error if the terms are not `f32`.
    pub(super) fn sum_of_leaves(&self, terms: &Tensor, out: DType) -> Result<Tensor> {
        let [count, rows, columns] = shapes::sum_of_leaves(terms)?;
        let mut y = self.scratch(&[rows, columns], out)?;
        let leaves = 1 << count.trailing_zeros();
        if leaves > LEAVES {
            return Err(Error::shape_mismatch("sum of leaves", terms, &y));
        }
        let mut call = self.call(Source::Rows(out, DType::F32), "sum_of_leaves");
        call.write(&mut y)?.read(terms)?.value((rows * columns) as u64);
        call.value(to_u32("leaves", leaves)?).value(to_u32("trees", count / leaves)?);
        // SAFETY: the kernel reads the `leaves` × `trees` terms and writes `y`: each has `rows` × `columns` elements.
        unsafe { call.launch_over(rows * columns) }?;
        Ok(y)
    }

    /// Converts values to another type.
    pub(super) fn convert(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let mut y = self.scratch(x.shape(), dtype)?;
        let count = x.count();
        let mut call = self.call(Source::Rows(dtype, x.dtype()), "convert");
        call.read(x)?.write(&mut y)?.value(count as u64);
        // SAFETY: the kernel reads `count` elements of `x` and writes as many of `y`, which both have.
        unsafe { call.launch_over(count) }?;
        Ok(y)
    }

    /// Computes `silu(gate) × up`; each row of `x` is gate, then up.
    ///
    /// # Errors
    /// Returns an error if the columns of `x` are odd.
    pub(super) fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, width) = (x.rows(), shapes::swiglu(x)?);
        let mut y = self.scratch(&[rows, width], x.dtype())?;
        let threads = 256;
        let across = width.div_ceil(16 / x.dtype().size() * threads as usize) as u32;
        let (rows, width) = (to_u32("rows", rows)?, to_u32("columns", width)?);
        let mut call = self.call(Source::Rows(x.dtype(), x.dtype()), "swiglu");
        call.read(x)?.write(&mut y)?.value(rows).value(width);
        // SAFETY: the kernel reads `rows` rows of 2 × `width` elements and writes as many of `width`.
        unsafe { call.launch([across, rows.min(MOST_BLOCKS_Y)], threads) }?;
        Ok(y)
    }

    /// Computes `x / sqrt(mean(x²) + epsilon) × weight`, row by row.
    ///
    /// # Errors
    /// Returns an error if the weight is not as long as a row.
    pub(super) fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
        shapes::rms_norm(x, weight)?;
        let mut y = self.scratch(x.shape(), x.dtype())?;
        let mut call = self.call(Source::Rows(x.dtype(), weight.dtype()), "add_norm");
        call.read(x)?.read_optional(None)?;
        // SAFETY: `x` and `y` have the same shape, with rows as long as the weight.
        unsafe { self.launch_norm(call, weight, epsilon, &mut y) }?;
        Ok(y)
    }

    /// Adds `y` to `x`, or to every row of `x` if `y` is a vector, and returns the norm of `x` as [`rms_norm`](Self::rms_norm) does.
    ///
    /// # Errors
    /// Returns an error if the weight is not as long as a row, or `y` has neither the shape of `x` nor that of a row.
    pub(super) fn add_norm(
        &self,
        x: &mut Tensor,
        y: &Tensor,
        weight: &Tensor,
        epsilon: f32,
    ) -> Result<Tensor> {
        if y.dtype() != x.dtype() || y.shape() != x.shape() {
            shapes::add(x, y)?;
            self.add(x, y)?;
            return self.rms_norm(x, weight, epsilon);
        }
        shapes::rms_norm(x, weight)?;
        let mut normed = self.scratch(x.shape(), x.dtype())?;
        let mut call = self.call(Source::Rows(x.dtype(), weight.dtype()), "add_norm");
        call.write(x)?.read(y)?;
        // SAFETY: all have the same shape, with rows as long as the weight.
        unsafe { self.launch_norm(call, weight, epsilon, &mut normed) }?;
        Ok(normed)
    }

    /// Launches a norm into `out`, whose first operands have been given.
    ///
    /// # Safety
    /// The first operands have the shape of `out`, whose rows are as long as the weight.
    unsafe fn launch_norm<'a>(
        &'a self,
        mut call: KernelCall<'a>,
        weight: &'a Tensor,
        epsilon: f32,
        out: &'a mut Tensor,
    ) -> Result<()> {
        let (rows, columns) = (to_u32("rows", out.rows())?, to_u32("columns", out.columns())?);
        let threads = norm_threads(out, weight);
        let is_settled = u32::from(self.here(weight)?.is_settled());
        call.read(weight)?.write(out)?.value(columns).value(epsilon).value(is_settled);
        // SAFETY: a block reads a row of `x`, of `y` unless it is null, and the weight, and writes a row of `out` and, if there is a `y`,
        // of `x`. All have `columns` elements, by the caller's promise. It reads the weight before the previous kernel has ended
        // only if no kernel has written it.
        unsafe { call.launch([rows, 1], threads) }
    }

    /// Copies columns of blocks `[blocks, rows, width]` that lie side by side. A matrix is one block.
    ///
    /// # Errors
    /// Returns an error if the blocks do not have them.
    pub(super) fn select_columns(&self, blocks: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        let [rows, width] = shapes::select_columns(blocks, &columns)?;
        let mut y = self.scratch(&[rows, columns.len()], blocks.dtype())?;
        let elements = y.count();
        let mut call = self.call(Source::Rows(blocks.dtype(), blocks.dtype()), "select_columns");
        call.read(blocks)?.write(&mut y)?.value(elements as u64).value(to_u32("rows", rows)?);
        call.value(to_u32("columns", width)?).value(to_u32("columns", columns.start)?);
        call.value(to_u32("columns", columns.len())?);
        // SAFETY: the kernel writes all elements of `y`, and reads for each one of the blocks': a row below `rows`, and one of the
        // columns, which the blocks have.
        unsafe { call.launch_over(elements) }?;
        Ok(y)
    }

    /// Returns the [candidates](crate::Compute::argmax) of each row of logits.
    ///
    /// # Errors
    /// Returns an error if the logits do not have these columns or are not `f32`.
    pub(super) fn argmax(&self, x: &Tensor, tokens: &Range<usize>) -> Result<Tensor> {
        argmax::check_columns(x, tokens)?;
        let (rows, parts) = (x.rows(), x.columns().div_ceil(PART));
        let mut y = self.scratch(&[rows, 2 * parts], DType::F32)?;
        let grid = [to_u32("rows", rows)?, to_u32("parts", parts)?];
        let mut call = self.call(Source::Rows(x.dtype(), x.dtype()), "argmax");
        call.read(x)?.write(&mut y)?.value(to_u32("columns", x.columns())?);
        call.value(to_u32("tokens", tokens.start)?).value(to_u32("tokens", tokens.len())?);
        // SAFETY: a block reads columns of a row, which are fewer than `tokens`, as many as `x` has at most, and writes the pair of its
        // part of the row: `y` has one for each block.
        unsafe { call.launch(grid, PART_THREADS) }?;
        Ok(y)
    }

    /// Replaces tokens of a batch by those of rows of candidates; see [`choose_tokens`](crate::Compute::choose_tokens).
    ///
    /// # Errors
    /// Returns an error if the candidates are no pairs in `f32` or do not have the rows, or the batch is in other memory.
    pub(super) fn choose(&self, batch: &mut Batch, candidates: &Tensor) -> Result<()> {
        let (count, rows, columns) = (batch.tokens().len(), candidates.rows(), candidates.columns());
        let has_pairs = candidates.shape().len() == 2 && columns > 0 && columns.is_multiple_of(2);
        if !has_pairs || batch.chosen_rows().any(|row| row >= rows) || candidates.dtype() != DType::F32 {
            return Err(Error::input(format!(
                "candidates {:?} of {} are no pairs in f32, or do not have the rows of {:?}",
                candidates.shape(),
                candidates.dtype(),
                batch.tokens()
            )));
        }
        let (state, ids) = (&batch.device()?.state, batch.slots().state_words() * size_of::<u32>());
        assert!(state.bytes() >= ids + count * size_of::<u32>(), "a batch has the ids of all its tokens");
        let mut call = self.call(Source::Rows(DType::F32, DType::F32), "choose");
        call.read(candidates)?.value(to_u32("pairs", columns / 2)?).value(to_u32("rows", rows)?);
        call.block(state, ids)?;
        // SAFETY: a block reads and writes one of the ids of the batch, which is borrowed exclusively, and reads the pairs of a row of
        // the candidates if they have it.
        unsafe { call.launch([to_u32("tokens", count)?, 1], 32) }?;
        batch.set_chosen();
        Ok(())
    }

    /// Computes sine and cosine of the angles of a part of a batch of `rows` tokens, from its positions and frequencies.
    ///
    /// # Errors
    /// Returns an error if the batch is in other memory or has more rows than a grid.
    pub(super) fn rotations(
        &self,
        batch: &mut DeviceBatch,
        part: &Part,
        (slots, rows): (&SlotMapping, usize),
        rotary: &Rotary,
    ) -> Result<()> {
        let Range { start, end } = part.rows;
        let half = rotary.half();
        assert!(start <= end && end <= rows, "the part is within the batch");
        let (positions, angles) =
            (slots.state_offset(part) * size_of::<u32>(), start * half * 2 * size_of::<f32>());
        // The frequencies of the first row, and the distance to those of the next: a run has the same in all rows.
        let (first, stride) = match (rotary.depends_on_length(), part.is_single()) {
            (false, _) => (0, 0),
            (true, false) => (part.runs.start * half, 0),
            (true, true) => (part.runs.start * half, half),
        };
        let frequencies = (slots.state_words() + rows + first) * size_of::<u32>();
        let last = (end - start).saturating_sub(1) * stride + half;
        let DeviceBatch { state, rotations } = batch;
        assert!(
            state.bytes() >= frequencies + last * size_of::<f32>(),
            "the frequencies are behind the tokens"
        );
        assert!(rotations.bytes() >= rows * half * 2 * size_of::<f32>(), "there is room for every angle");
        let (grid, half) = (to_u32("rows", end - start)?, to_u32("frequencies", half)?);
        let mut call = self.call(Source::Rows(DType::F32, DType::F32), "rotations");
        call.block(state, frequencies)?.block(state, positions)?.block(rotations, angles)?.value(half);
        call.value(to_u32("frequencies", stride)?).value(rotary.amplitude());
        // SAFETY: a block reads one of the part's positions, which lie before the frequencies, and `half` frequencies, which begin
        // `stride` after those of the block before, and writes `half` pairs of floats for its row: the asserts above. Both blocks
        // belong to the batch, which is borrowed exclusively.
        unsafe { call.launch([grid, 1], half.next_multiple_of(32).min(256)) }
    }

    /// Normalises each query and key head of the rows of `qkv`, in place, as [`rms_norm`](Self::rms_norm) does a row. The caller
    /// has checked the number of query and key heads of each row, and that each weight vector has the length of a head.
    ///
    /// # Errors
    /// Returns an error if the weights are not in the memory of the GPU, or not of one type.
    pub(super) fn head_norms(
        &self,
        qkv: &mut Tensor,
        norms: &HeadNorms<'_>,
        [heads, kv_heads, head_dim]: [usize; 3],
    ) -> Result<()> {
        let HeadNorms { queries, keys, epsilon } = *norms;
        assert!((heads + kv_heads) * head_dim <= qkv.columns(), "a row has all heads");
        assert_eq!([queries.count(), keys.count()], [head_dim; 2], "a weight is as long as a head");
        if queries.dtype() != keys.dtype() {
            return Err(Error::shape_mismatch("norms of heads", queries, keys));
        }
        let (rows, width) = (to_u32("rows", qkv.rows())?, to_u32("columns", qkv.columns())?);
        let across = to_u32("heads", heads + kv_heads)?;
        let mut call = self.call(Source::Rows(qkv.dtype(), queries.dtype()), "head_norms");
        call.write(qkv)?.read(queries)?.read(keys)?.value(width).value(to_u32("elements", head_dim)?);
        call.value(to_u32("heads", heads)?).value(epsilon);
        // SAFETY: a block reads and writes one of the first heads of a row, and reads a weight, all of `head_dim` elements:
        // checked above.
        unsafe { call.launch([rows, across], 32) }
    }
}
