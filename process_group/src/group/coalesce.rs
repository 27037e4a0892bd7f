//! Reduces many tensors with few messages.

use std::ops::Range;

use super::ProcessGroup;
use super::inner::Buffers;
use crate::device::buffer::{BufferMut, ViewMut};
use crate::error::Result;
use crate::types::aligned::AlignedBytes;
use crate::types::dtype::DType;
use crate::types::operation::{Composed, Operation, ReduceOp};

impl ProcessGroup {
    /// Executes an [`all_reduce`](Self::all_reduce) of many buffers with few messages: neighbours of one type share buckets of the
    /// configured size; on a GPU all of them form one NCCL group. Every rank passes the same types and lengths in the same order.
    pub fn all_reduce_coalesced(&mut self, buffers: &mut [&mut dyn BufferMut], op: ReduceOp) -> Result<()> {
        // Each buffer lends its elements once, and all are checked before the first is reduced.
        let views: Vec<ViewMut<'_>> = buffers.iter_mut().map(|b| b.view_mut()).collect();
        let operation = Operation::AllReduce(op);
        views.iter().try_for_each(|view| self.check_memory(operation, view.memory()))?;
        self.compose(Composed::coalesced(views.iter().map(|v| (v.dtype(), v.count()))), |group| {
            if group.device.is_some() {
                group.all_reduce_together(operation, views)
            } else {
                group.all_reduce_packed(operation, views)
            }
        })
    }

    /// Reduces buffers in host memory: packs them into buckets.
    fn all_reduce_packed(&mut self, operation: Operation, mut views: Vec<ViewMut<'_>>) -> Result<()> {
        let shapes: Vec<(DType, usize)> = views.iter().map(|v| (v.dtype(), v.byte_len())).collect();
        let mut packed = AlignedBytes::default();
        for bucket in buckets(&shapes, self.info.bucket_bytes) {
            let dtype = shapes[bucket.start].0;
            let views = &mut views[bucket.clone()];
            if let [view] = views {
                self.in_place(operation, ViewMut::from_bytes(dtype, view.host()?)?)?;
                continue;
            }
            let total = shapes[bucket].iter().map(|s| s.1).sum();
            let bytes = packed.first(total);
            let mut at = 0;
            for view in views.iter() {
                let from = view.as_view().host()?;
                bytes[at..at + from.len()].copy_from_slice(from);
                at += from.len();
            }
            self.in_place(operation, ViewMut::from_bytes(dtype, bytes)?)?;
            let mut at = 0;
            for view in views {
                let to = view.host()?;
                to.copy_from_slice(&packed.first(total)[at..at + to.len()]);
                at += to.len();
            }
        }
        Ok(())
    }

    /// Reduces buffers on a GPU without copies: the backend executes all of them in one group.
    fn all_reduce_together(&mut self, operation: Operation, views: Vec<ViewMut<'_>>) -> Result<()> {
        let mut calls = Vec::with_capacity(views.len());
        let mut sequence = self.collectives;
        for view in views {
            sequence += 1;
            let fingerprint = self.fingerprint(operation, view.dtype(), view.count())?;
            calls.push((fingerprint, sequence, Buffers::InPlace(Some(view))));
        }
        self.collectives = sequence;
        self.wait_idle();
        self.inner.run_all(calls)
    }
}

/// Joins neighbours of one type while they fit a bucket. Every buffer is in exactly one range.
fn buckets(shapes: &[(DType, usize)], limit: usize) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut filled = 0;
    for (index, (dtype, bytes)) in shapes.iter().enumerate() {
        match ranges.last_mut() {
            Some(range) if shapes[range.start].0 == *dtype && filled + bytes <= limit => {
                range.end = index + 1;
                filled += bytes;
            }
            _ => {
                ranges.push(index..index + 1);
                filled = *bytes;
            }
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::buffer::{Buffer, DeviceMemory, View};
    use crate::error::Error;

    /// A buffer that claims to be in the memory of a GPU.
    struct Elsewhere;

    const NOWHERE: DeviceMemory = DeviceMemory { ordinal: 0, address: 0, bytes: 0 };

    impl Buffer for Elsewhere {
        #[allow(unsafe_code, reason = "a buffer without elements, to be refused")]
        fn view(&self) -> View<'_> {
            // SAFETY: no bytes are lent.
            unsafe { View::on_device(DType::F32, NOWHERE) }
        }
    }

    impl BufferMut for Elsewhere {
        #[allow(unsafe_code, reason = "a buffer without elements, to be refused")]
        fn view_mut(&mut self) -> ViewMut<'_> {
            // SAFETY: no bytes are lent.
            unsafe { ViewMut::on_device(DType::F32, NOWHERE) }
        }
    }

    #[test]
    fn a_buffer_that_is_refused_keeps_those_before_it_from_being_reduced() {
        let mut group = ProcessGroup::loopback(1).remove(0);
        let (mut floats, mut longs, mut elsewhere) = ([1.0f32], [1i64], Elsewhere);
        let mut all: Vec<&mut dyn BufferMut> = vec![&mut floats, &mut longs, &mut elsewhere];
        let error = group.all_reduce_coalesced(&mut all, ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        assert!(group.last_call().is_none(), "nothing was called");
    }

    #[test]
    fn buckets_keep_types_apart_and_sizes_below_the_limit() {
        let shapes =
            [(DType::F32, 40), (DType::F32, 40), (DType::F32, 40), (DType::F16, 10), (DType::F16, 200)];
        assert_eq!(buckets(&shapes, 100), [0..2, 2..3, 3..4, 4..5]);
        assert!(buckets(&[], 100).is_empty());
    }
}
