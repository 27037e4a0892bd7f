//! Many tensors in few messages.

use std::ops::Range;

use super::ProcessGroup;
use super::engine::Buffers;
use crate::aligned::AlignedBytes;
use crate::buffer::{BufferMut, ViewMut};
use crate::call::{Operation, ReduceOp};
use crate::dtype::DType;
use crate::error::Result;

impl ProcessGroup {
    /// [`all_reduce`](Self::all_reduce) of many buffers with few messages: neighbours of one type share buckets of
    /// the configured size. Every rank passes the same types and lengths in the same order.
    pub fn all_reduce_coalesced(&mut self, buffers: &mut [&mut dyn BufferMut], op: ReduceOp) -> Result<()> {
        let shapes: Vec<(DType, usize)> =
            buffers.iter().map(|b| b.view()).map(|v| (v.dtype(), v.byte_len())).collect();
        if self.device.is_some() {
            return self.all_reduce_together(buffers, op);
        }
        let mut packed = AlignedBytes::default();
        for bucket in buckets(&shapes, self.info.bucket_bytes) {
            let dtype = shapes[bucket.start].0;
            if bucket.len() == 1 {
                self.in_place(Operation::AllReduce(op), buffers[bucket.start].view_mut())?;
                continue;
            }
            let total = shapes[bucket.clone()].iter().map(|s| s.1).sum();
            let bytes = packed.first(total);
            let mut at = 0;
            for buffer in &buffers[bucket.clone()] {
                let from = buffer.view();
                let from = from.host()?;
                bytes[at..at + from.len()].copy_from_slice(from);
                at += from.len();
            }
            self.in_place(Operation::AllReduce(op), ViewMut::from_bytes(dtype, bytes)?)?;
            let mut at = 0;
            for buffer in &mut buffers[bucket] {
                let mut to = buffer.view_mut();
                let to = to.host()?;
                to.copy_from_slice(&packed.first(total)[at..at + to.len()]);
                at += to.len();
            }
        }
        Ok(())
    }

    /// On a GPU nothing is copied: the backend takes all of them in one group.
    fn all_reduce_together(&mut self, buffers: &mut [&mut dyn BufferMut], op: ReduceOp) -> Result<()> {
        let operation = Operation::AllReduce(op);
        let mut calls = Vec::with_capacity(buffers.len());
        let mut sequence = self.collectives;
        for buffer in buffers.iter_mut() {
            let view = buffer.view_mut();
            self.check_memory(operation, view.memory())?;
            sequence += 1;
            let signature = self.signature(operation, view.dtype(), view.count())?;
            calls.push((signature, sequence, Buffers::InPlace(Some(view))));
        }
        self.collectives = sequence;
        self.wait_idle();
        self.engine.run_all(calls)
    }
}

/// Neighbours of one type, joined while they fit a bucket. Every buffer is in exactly one range.
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

    #[test]
    fn buckets_keep_types_apart_and_sizes_below_the_limit() {
        let shapes =
            [(DType::F32, 40), (DType::F32, 40), (DType::F32, 40), (DType::F16, 10), (DType::F16, 200)];
        assert_eq!(buckets(&shapes, 100), [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(buckets(&[], 100), []);
    }
}
