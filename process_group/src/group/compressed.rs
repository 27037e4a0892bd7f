//! All-reduce of f32 values that are sent as 16-bit values.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::ProcessGroup;
use crate::cpu::reduce::{Source, reduce};
use crate::device::Device;
use crate::device::buffer::{BufferMut, ViewMut};
use crate::device::wire::{WireBuffer, WireMemory};
use crate::error::{Error, Result};
use crate::types::dtype::{DType, Element};
use crate::types::operation::{Composed, Operation, ReduceOp};

/// The type that [`ProcessGroup::all_reduce_compressed`] sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WireType {
    /// The range of f32, with 8 bits of precision.
    Bf16,
    /// 11 bits of precision. Values and results beyond ±65504 become infinite, and those closer to zero than 2⁻¹⁴ lose precision.
    F16,
}

impl WireType {
    const fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    /// Returns the maximum error of rounding a value to this type, relative to the value: half a unit in the last place.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Self::Bf16 => 1.0 / 256.0,
            Self::F16 => 1.0 / 2048.0,
        }
    }

    /// Returns the maximum error of an element of a sum over `world_size` ranks, relative to the sum of the absolute values of that
    /// element on all ranks; the same for an average, relative to the average of the absolute values.
    ///
    /// It consists of two roundings to 16 bits, of the inputs and of the result, and the sum in f32 between them: (1 + u)² (1 + n
    /// 2⁻²³) − 1, about 2 u: 0.8 % for bf16 and 0.1 % for f16. Its growth with the number of ranks is negligible. Where terms
    /// cancel, the error relative to the result is larger. It applies to values in the type's range.
    pub fn error_bound(self, world_size: usize) -> f64 {
        let rounded = 1.0 + self.unit_roundoff();
        rounded * rounded * (1.0 + world_size as f64 * f64::from(f32::EPSILON)) - 1.0
    }
}

impl std::fmt::Display for WireType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

impl ProcessGroup {
    /// Executes an [`all_reduce`](Self::all_reduce) of f32 values with half the bytes: every rank rounds its values to `wire`, the
    /// rounded values are summed in f32 in rank order, and the result is rounded to `wire` again. All ranks get the same bits. For
    /// the error see [`WireType::error_bound`].
    ///
    /// On CPUs this is an all-to-all and an all-gather of 16-bit values in profiles and records, on GPUs an all-reduce. There an
    /// average is the rounded sum divided in f32, so that a sum beyond the range of f16 makes its average infinite too; and if NCCL
    /// executes the call, it rounds the intermediate sums, in an order of its own, and the error bound does not apply. All ranks
    /// pass the same type. Before a call is captured into a graph, make one of that length and type: it allocates.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a reduction that is neither a sum nor an average, for values that are not f32, and for slices of
    /// cudarc; those of the calls.
    pub fn all_reduce_compressed(
        &mut self,
        buffer: &mut (impl BufferMut + ?Sized),
        op: ReduceOp,
        wire: WireType,
    ) -> Result<()> {
        if !matches!(op, ReduceOp::Sum | ReduceOp::Avg) {
            return Err(Error::invalid(format!(
                "a compressed all-reduce cannot reduce by `{op}`; use Sum or Avg, or `all_reduce`"
            )));
        }
        let mut values = buffer.view_mut();
        self.check_memory(Operation::AllReduce(op), values.memory())?;
        if values.dtype() != DType::F32 {
            return Err(Error::invalid(format!(
                "a compressed all-reduce takes f32 values, not {}; send 16-bit values with `all_reduce`",
                values.dtype()
            )));
        }
        if let Some(device) = self.device.clone() {
            return self.all_reduce_on_gpu(&device, values, op, wire);
        }
        let values = bytemuck::cast_slice_mut(values.host()?);
        match wire {
            WireType::Bf16 => self.all_reduce_as::<bf16>(values, op),
            WireType::F16 => self.all_reduce_as::<f16>(values, op),
        }
    }

    fn all_reduce_on_gpu(
        &mut self,
        device: &Device,
        mut values: ViewMut<'_>,
        op: ReduceOp,
        wire: WireType,
    ) -> Result<()> {
        if values.device().is_none() {
            return Err(Error::invalid(
                "compressed all-reduce: a CudaSlice is not accepted here; pass a DeviceBuffer or a view",
            ));
        }
        let mut memory = self.wire.take().unwrap_or_else(|| WireMemory::new(device));
        let outcome = match memory.room(wire.dtype(), values.count()) {
            Ok(sent) => self.all_reduce_through(sent, &mut values, op),
            Err(error) => Err(error.into()),
        };
        self.wire = Some(memory);
        outcome
    }

    fn all_reduce_through(
        &mut self,
        sent: &mut WireBuffer,
        values: &mut ViewMut<'_>,
        op: ReduceOp,
    ) -> Result<()> {
        sent.narrow(values)?;
        self.compose(Composed::compressed(op, 0), |group| {
            group.in_place(Operation::AllReduce(ReduceOp::Sum), sent.values(values.count())?.view_mut())
        })?;
        let divisor = if op == ReduceOp::Avg { self.world_size() as f32 } else { 1.0 };
        Ok(sent.widen(values, divisor)?)
    }

    fn all_reduce_as<T: Element>(&mut self, buffer: &mut [f32], op: ReduceOp) -> Result<()>
    where
        [T]: HalfFloatSliceExt,
    {
        let (n, me) = (self.world_size(), self.info.rank.index());
        // A chunk for each rank; the last chunks are padded with zeros.
        let chunk = buffer.len().div_ceil(n);
        let mut wire = vec![T::zeroed(); n * chunk];
        wire[..buffer.len()].convert_from_f32_slice(buffer);
        self.compose(Composed::compressed(op, n * chunk - buffer.len()), |group| {
            group.all_to_all(&mut wire)?;
            reduce_chunks(&mut wire, me, chunk, op, (op == ReduceOp::Avg).then_some(n));
            group.all_gather(&mut wire)
        })?;
        wire[..buffer.len()].convert_to_f32_slice(buffer);
        Ok(())
    }
}

/// Reduces the chunks of all ranks, in rank order, into the chunk of rank `me`.
fn reduce_chunks<T: Element>(wire: &mut [T], me: usize, chunk: usize, op: ReduceOp, divisor: Option<usize>) {
    if chunk == 0 {
        return;
    }
    let (before, rest) = wire.split_at_mut(me * chunk);
    let (own, after) = rest.split_at_mut(chunk);
    let bytes = |chunk| Source::Bytes(bytemuck::cast_slice::<T, u8>(chunk));
    let mut sources: Vec<Source<'_>> = before.chunks(chunk).map(bytes).collect();
    sources.push(Source::Destination);
    sources.extend(after.chunks(chunk).map(bytes));
    reduce(T::DTYPE, op, bytemuck::cast_slice_mut(own), &sources, divisor);
}
