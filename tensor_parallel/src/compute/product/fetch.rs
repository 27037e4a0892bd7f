//! Prefetches.

/// Prefetches a cache line. Any address is right.
#[inline(always)]
#[expect(clippy::inline_always, reason = "it is part of inner loops")]
pub(super) fn fetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "a prefetch is an intrinsic")]
    // SAFETY: every x86-64 processor has the instruction, and it takes any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
