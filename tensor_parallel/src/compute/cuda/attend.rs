//! Attention on a GPU.

use bytemuck::{Pod, Zeroable};
use ryzanstein_process_group::DType;

use super::core::{ARRIVALS, Cuda, small};
use super::kernels::Source;
use super::launch::Arguments;
use crate::compute::batch::SlotMapping;
use crate::compute::operations::{AttentionCall, LayerCache};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// As in `attention.cu`.
const THREADS: u32 = 128;
const MOST_SPLITS: usize = 64;
/// Positions below which a split is not worth its combination.
const FEWEST: usize = 64;
/// The longest head whose tiles fit the shared memory of a block.
const LONGEST: usize = 256;

/// `Shape` of `attention.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Shape {
    rows: u32,
    kv_heads: u32,
    capacity: u32,
    window: u32,
    scale: f32,
}

/// Query heads that a block of `decode` takes: the most that divide the group.
fn heads_a_block(group: usize, head_dim: usize) -> usize {
    let most = if head_dim > 128 { 4 } else { 8 };
    (1..=most).rev().find(|h| group.is_multiple_of(*h)).unwrap_or(1)
}

/// Whether `prefill.cu` can compute a prompt.
pub(super) fn suits_tensor_cores(dtype: DType, head_dim: usize, capability: (u32, u32)) -> bool {
    dtype != DType::F32 && head_dim.is_multiple_of(16) && head_dim <= 128 && capability >= (8, 0)
}

/// Queries of a tile of `prefill`.
fn tile(head_dim: usize, tensor: bool) -> usize {
    match (tensor, head_dim) {
        (true, _) => 64,
        (false, ..=128) => 32,
        (false, _) => 16,
    }
}

impl Cuda {
    pub(super) fn attend(
        &self,
        qkv: &Tensor,
        call: &AttentionCall<'_>,
        cache: &mut LayerCache,
    ) -> Result<Tensor> {
        cache.admit(qkv, call)?;
        let &AttentionCall { heads, kv_heads, head_dim, batch, window } = call;
        let rows = qkv.rows();
        let dtype = qkv.dtype();
        if cache.keys.dtype() != dtype {
            return Err(Error::input(format!(
                "attention on a GPU needs a cache of the activations' type {dtype}, and this one is {}",
                cache.keys.dtype()
            )));
        }
        if head_dim > LONGEST || !head_dim.is_multiple_of(2) {
            return Err(Error::input(format!(
                "attention on a GPU takes heads of an even length up to {LONGEST}, not {head_dim}; run this model with \
                 the backend tcp"
            )));
        }
        let (y, out) = self.tensor(&[rows, heads * head_dim], dtype)?;
        if rows == 0 {
            return Ok(y);
        }
        let group = heads / kv_heads;
        let shape = Shape {
            rows: small("positions", rows)?,
            kv_heads: small("heads", kv_heads)?,
            capacity: small("positions", cache.capacity())?,
            window: window.map_or(0, |w| u32::try_from(w.max(1)).unwrap_or(0)),
            scale: 1.0 / (head_dim as f32).sqrt(),
        };
        let tensor = suits_tensor_cores(dtype, head_dim, self.gpu.device.info().capability);
        let source = Source::Attention(dtype, head_dim, group, tensor);
        let (keys, values) = (self.address(&cache.keys)?, self.address(&cache.values)?);
        let place = self.place(batch)?;
        let mut operands = Arguments::default();
        operands.push(self.address(qkv)?).push(place.rotations.address()).push(place.state.address());
        operands.push(keys).push(values);
        if rows == 1 || matches!(batch.slots(), SlotMapping::OnePerSequence(_)) {
            let across = rows * heads / heads_a_block(group, head_dim);
            if across > ARRIVALS {
                return Err(Error::input(format!(
                    "{heads} heads of {rows} sequences on one GPU are more than {ARRIVALS} blocks; decode fewer at once"
                )));
            }
            let splits = self.splits(across, cache.capacity());
            // It goes back to the pool at the end of this function: whoever gets it next comes later in the stream.
            let partial = self.gpu.scratch(rows * heads * splits * (head_dim + 2) * size_of::<f32>())?;
            operands.push(out).push(partial.address()).push(self.arrivals.address()).push(shape);
            self.kernels.blocks(source, "decode", [splits as u32, across as u32], THREADS, &operands)?;
            return Ok(y);
        }
        let mut appended = Arguments::default();
        appended.push(self.address(qkv)?).push(place.rotations.address()).push(place.state.address());
        appended.push(keys).push(values).push(shape);
        self.kernels.blocks(source, "append", [shape.rows, shape.kv_heads], 64, &appended)?;
        operands.push(out).push(shape);
        let tiles = (rows * group).div_ceil(tile(head_dim, tensor)) as u32;
        self.kernels.blocks(source, "prefill", [tiles, shape.kv_heads], THREADS, &operands)?;
        Ok(y)
    }

    /// Into how many parts the positions are cut: enough to keep every multiprocessor busy when the cache is full.
    fn splits(&self, across: usize, capacity: usize) -> usize {
        let blocks = 3 * self.gpu.device.info().multiprocessors as usize;
        (blocks / across).clamp(1, MOST_SPLITS).min(capacity.div_ceil(FEWEST)).max(1)
    }
}
