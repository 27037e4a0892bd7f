//! The only module that calls the `gemm` crates.

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;

/// Computes `out[m, n] = x[m, k] · w[n, k]ᵀ`, all row-major. Rows of `out` are `stride` long; their first `n` elements are
/// written.
pub(super) fn multiply(x: &[f32], w: &[f32], out: &mut [f32], k: usize, stride: usize) {
    if k == 0 || w.is_empty() || x.is_empty() {
        return;
    }
    let (m, n) = (x.len() / k, w.len() / k);
    assert!(x.len() == m * k && w.len() == n * k, "operands must be whole rows");
    let end = (m - 1).checked_mul(stride).and_then(|start| start.checked_add(n));
    assert!(n <= stride && end.is_some_and(|end| end <= out.len()), "the result must fit");
    let (k_stride, out_stride) = (k as isize, stride as isize);
    #[expect(unsafe_code, reason = "the crate takes pointers and strides")]
    // SAFETY: the assertions above bound every address: x is m rows of k, w is n rows of k (read as its transpose by
    // swapping the strides), and out has (m - 1) full strides and n more elements. `out` is borrowed mutably, so it
    // overlaps neither operand. It is not read, because `read_dst` is false.
    unsafe {
        // Computed as outᵀ = w · xᵀ: the kernels prefer results whose columns are contiguous.
        get_gemm_fn()(
            n,
            m,
            k,
            out.as_mut_ptr(),
            out_stride,
            1,
            false,
            w.as_ptr(),
            1,
            k_stride,
            x.as_ptr(),
            k_stride,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
