//! An all-reduce fused with the next operations of a transformer's layer.

use super::ProcessGroup;
use super::inner::Buffers;
use crate::backend::call::AddNorm;
use crate::device::buffer::{Buffer, BufferMut};
use crate::error::{Error, Result};
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Composed, Operation, ReduceOp};
use crate::types::sync::lock;

impl ProcessGroup {
    /// Returns true if [`all_reduce_add_norm`](Self::all_reduce_add_norm) accepts `rows` rows of `columns` terms of type `dtype`. It
    /// does if the ranks share the memory of their GPUs and add such an array there, if it is of f32, or of f16 or bf16 and at most
    /// 8 MiB long, if a row has a multiple of 16 bytes and at most 64 KiB (8 KiB before Hopper), and if no path is forced. Otherwise
    /// sum, add and normalise in separate steps. Every rank gets the same answer.
    pub fn fuses_add_norm(&self, dtype: DType, rows: usize, columns: usize) -> bool {
        let Some(count) = rows.checked_mul(columns).filter(|count| *count > 0) else { return false };
        lock(&self.inner.core).backend.backend().fuses_add_norm(dtype, count, columns)
    }

    /// Executes in one kernel: sums `terms` (`[rows × columns]`) over the ranks, adds the sum to `residual` (of the same shape), and
    /// fills `out` with the rows of `residual / sqrt(mean(residual²) + epsilon) × weight`. `weight` (`[columns]`) is f32. `out` has
    /// the type of `residual`, the same on every rank, and `terms` has it too or is f32. Sum, residual and result are each rounded
    /// once to that type.
    ///
    /// The kernel follows the fused all-reduces of TensorRT-LLM and SGLang. Profiles and records show this as an all-reduce. After
    /// an error, `out` and `residual` contain no result.
    ///
    /// # Errors
    /// [`Error::Invalid`] where [`fuses_add_norm`](Self::fuses_add_norm) is false, when types or lengths do not fit, and for slices
    /// of cudarc; otherwise as [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_add_norm(
        &mut self,
        terms: &(impl Buffer + ?Sized),
        residual: &mut (impl BufferMut + ?Sized),
        (weight, epsilon): (&(impl Buffer + ?Sized), f32),
        out: &mut (impl BufferMut + ?Sized),
    ) -> Result<()> {
        let operation = Operation::AllReduce(ReduceOp::Sum);
        let (terms, residual, weight, out) =
            (terms.view(), residual.view_mut(), weight.view(), out.view_mut());
        for memory in [terms.memory(), residual.memory(), weight.memory(), out.memory()] {
            self.check_memory(operation, memory)?;
        }
        let (dtype, count, columns) = (terms.dtype(), terms.count(), weight.count());
        let is_row = weight.dtype() == DType::F32 && columns > 0 && count.is_multiple_of(columns);
        let takes_terms = dtype == residual.dtype() || dtype == DType::F32;
        if !is_row
            || !takes_terms
            || [residual.count(), out.count()] != [count; 2]
            || out.dtype() != residual.dtype()
        {
            return Err(Error::invalid(format!(
                "all-reduce with norm of {count} {dtype}: the residual has {} {}, the result {} {}, and the weight {columns} {}; \
                 residual and result must have {count} elements of one type, that of the terms unless those are f32, and the weight \
                 those of one row in f32",
                residual.count(),
                residual.dtype(),
                out.count(),
                out.dtype(),
                weight.dtype()
            )));
        }
        if !self.fuses_add_norm(dtype, count / columns, columns) {
            return Err(Error::invalid(format!(
                "group `{}` has no all-reduce with norm of {count} {dtype} in rows of {columns}; ask fuses_add_norm first, and \
                 otherwise call all_reduce",
                self.info.name
            )));
        }
        if [
            terms.device().is_none(),
            residual.device().is_none(),
            weight.device().is_none(),
            out.device().is_none(),
        ]
        .contains(&true)
        {
            return Err(Error::invalid(
                "all-reduce with norm: a CudaSlice is not accepted here; pass a DeviceBuffer or a view",
            ));
        }
        let composed = Composed::with_norm(out.dtype(), columns);
        let fingerprint = CallFingerprint { composed, ..self.fingerprint(operation, dtype, count)? };
        let sequence = self.next();
        self.wait_idle();
        self.inner.run(
            fingerprint,
            sequence,
            Buffers::AddNorm(terms, out, AddNorm { residual, weight, epsilon }),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_without_the_kernel_refuses_and_says_what_to_call() {
        let mut group = ProcessGroup::loopback(1).remove(0);
        assert!(!group.fuses_add_norm(DType::F32, 1, 8));
        let (x, mut residual, weight, mut out) = ([1.0f32; 8], [0.0f32; 8], [1.0f32; 8], [0.0f32; 8]);
        let norm = (&weight, 1e-5);
        let error = group.all_reduce_add_norm(&x, &mut residual, norm, &mut out).unwrap_err();
        assert!(error.to_string().contains("call all_reduce"), "{error}");
        let error = group.all_reduce_add_norm(&x, &mut residual[..4], norm, &mut out).unwrap_err();
        assert!(error.to_string().contains("the residual has 4 f32"), "{error}");
        let halves = [half::bf16::ONE; 8];
        let error = group.all_reduce_add_norm(&halves, &mut residual, norm, &mut out).unwrap_err();
        assert!(error.to_string().contains("that of the terms unless those are f32"), "{error}");
        assert!(group.last_call().is_none());
    }
}
