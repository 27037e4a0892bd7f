//! Copies between a rank's own memory and a segment, as fast as the processor can.
//!
//! `unsafe` rests on what each function asks of its caller, who has checked the bounds.
#![allow(unsafe_code, reason = "copies by vectors; each function says what it rests on")]

#[cfg(target_arch = "x86_64")]
use std::arch::{
    asm,
    x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
        _mm512_loadu_si512, _mm512_store_si512, _mm512_stream_si512,
    },
};

#[cfg(target_arch = "x86_64")]
use crate::processor::{ProcessorMaker, processor};

/// Bytes of a cache line.
const LINE: usize = 64;
/// From this many bytes on, whole lines may have a copy of their own.
const BY_LINES_FROM: usize = 1 << 10;

/// Copies whole cache lines: source, destination, and how many. The lines may be read at the source and written at the destination, which is
/// at a multiple of a line, and the two do not overlap.
type LineCopy = unsafe fn(*const u8, *mut u8, usize);

/// Copies bytes, whole lines of them past the cache if `past_cache`.
///
/// # Safety
/// `len` bytes may be read at `from` and written at `to`, and the two do not overlap.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize, past_cache: bool) {
    let line_copy = if len < BY_LINES_FROM { None } else { fastest(past_cache) };
    // SAFETY: as the caller says. The processor has what `fastest` chooses.
    unsafe { copy_with(line_copy, from, to, len) }
}

/// # Safety
/// As above, and the processor has the instructions of `line_copy`.
unsafe fn copy_with(line_copy: Option<LineCopy>, from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller says. The three pieces follow each other, and the second begins at a line of `to`.
    unsafe {
        let before = to.addr().wrapping_neg() % LINE;
        let (Some(line_copy), true) = (line_copy, before <= len) else {
            return to.copy_from_nonoverlapping(from, len);
        };
        to.copy_from_nonoverlapping(from, before);
        let lines = (len - before) / LINE;
        line_copy(from.add(before), to.add(before), lines);
        let done = before + lines * LINE;
        to.add(done).copy_from_nonoverlapping(from.add(done), len - done);
    }
}

/// The fastest copy of lines, unless it is the standard library's.
#[cfg(target_arch = "x86_64")]
fn fastest(past_cache: bool) -> Option<LineCopy> {
    // Measured on a Xeon alone: elsewhere the others stay.
    let is_wide = processor().maker == ProcessorMaker::Intel && is_x86_feature_detected!("avx512f");
    match (is_wide, past_cache) {
        (true, true) => Some(wide::<true>),
        (true, false) => Some(wide::<false>),
        (false, true) => Some(stream),
        (false, false) => None,
    }
}

#[cfg(not(target_arch = "x86_64"))]
const fn fastest(_past_cache: bool) -> Option<LineCopy> {
    None
}

/// Copies a line an instruction, and asks for lines before their turn: an Intel processor takes long to fetch a line that another core has
/// written, and to take one from it for a store. Its own prefetches end with the page.
///
/// # Safety
/// That of a [`LineCopy`], and the processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn wide<const PAST_CACHE: bool>(from: *const u8, to: *mut u8, lines: usize) {
    /// How many bytes ahead a line is fetched.
    const FETCHED: usize = 1 << 10;
    /// How many bytes ahead a line is taken for a store.
    const TAKEN: usize = 512;
    for at in (0..lines).map(|line| line * LINE) {
        // SAFETY: the line is in bounds as the caller says. A prefetch may name any address.
        unsafe {
            let (from, to) = (from.add(at), to.add(at));
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(FETCHED).cast());
            let line = _mm512_loadu_si512(from.cast());
            if PAST_CACHE {
                _mm512_stream_si512(to.cast(), line);
            } else {
                // `_mm_prefetch` takes no line for a store unless the compiler may count on the instruction.
                asm!("prefetchw [{}]", in(reg) to.wrapping_add(TAKEN), options(nostack, preserves_flags));
                _mm512_store_si512(to.cast(), line);
            }
        }
    }
    if PAST_CACHE {
        // What is published afterwards would otherwise come before these stores.
        _mm_sfence();
    }
}

/// Copies past the cache on any processor of the architecture.
///
/// # Safety
/// That of a [`LineCopy`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: *const u8, to: *mut u8, lines: usize) {
    let (from, to): (*const __m128i, *mut __m128i) = (from.cast(), to.cast());
    for line in 0..lines {
        // SAFETY: four vectors are a line, which is aligned and in bounds as the caller says.
        unsafe {
            let vectors = [0, 1, 2, 3].map(|vector| _mm_loadu_si128(from.add(line * 4 + vector)));
            for (vector, value) in vectors.into_iter().enumerate() {
                _mm_stream_si128(to.add(line * 4 + vector), value);
            }
        }
    }
    // SAFETY: as the vectors. It has the same reason as above.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that this processor can do, whatever is fastest.
    fn line_copies() -> Vec<Option<LineCopy>> {
        let all = vec![None];
        #[cfg(target_arch = "x86_64")]
        let all = {
            let wide = [Some(wide::<true> as LineCopy), Some(wide::<false> as LineCopy)];
            let has_wide = is_x86_feature_detected!("avx512f");
            [all, vec![Some(stream as LineCopy)], if has_wide { wide.to_vec() } else { Vec::new() }].concat()
        };
        all
    }

    #[test]
    fn bytes_arrive_at_every_alignment_and_nothing_around_them_changes() {
        let bytes: Vec<u8> = (0..5100u32).map(|i| (i % 251) as u8 + 1).collect();
        for (which, line_copy) in line_copies().into_iter().enumerate() {
            for (at, len) in (0..70).flat_map(|at| [0, 1, 63, 130, 1023, 1024, 5000].map(|len| (at, len))) {
                let (mut all, start) = ([0; 5200], 69 - at);
                // SAFETY: both ranges are in bounds, and of different arrays; `line_copies` has asked the processor.
                unsafe { copy_with(line_copy, bytes[start..].as_ptr(), all[at..].as_mut_ptr(), len) };
                assert_eq!(&all[at..at + len], &bytes[start..start + len], "copy {which}");
                let around = all[..at].iter().chain(&all[at + len..]);
                assert!(around.into_iter().all(|byte| *byte == 0), "copy {which}: {len} bytes at {at}");
            }
        }
    }
}
