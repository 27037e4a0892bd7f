//! Products of bf16 in the tiles of Intel's AMX: 16 rows of 64 bytes. A tile of weights is read from where it is stored; the
//! activations are put in the order that the tiles want once for each product.

#![expect(unsafe_code, reason = "instructions that the caller must know the processor to have")]

use std::arch::asm;
use std::arch::x86_64::{
    __m512i, _mm512_loadu_si512, _mm512_shuffle_i32x4, _mm512_storeu_si512, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::ops::Range;
use std::sync::OnceLock;

use half::bf16;

use crate::threads::{PARALLEL_THRESHOLD, Threads};

/// Rows of a tile.
const ROWS: usize = 16;
/// Elements of a row of a tile: as many of each sum are added by one instruction.
pub(super) const DEPTH: usize = 32;
/// Activation rows from which tiles are faster than dot products. Below, memory is the limit, and a tile's 16 rows of weights are too
/// many streams for it: one row took 55 to 71 ms with tiles and 42 to 49 without, eight rows 81 to 89 and 81 to 104.
pub(super) const FEWEST_ROWS: usize = 8;
/// Words of a tile of activations.
const TILE: usize = ROWS * ROWS;
/// Bytes of weights that stay in the second-level cache while activations go by.
const CACHED: usize = 1 << 20;

/// Number of the tiles among the states that a process must ask for, and the call that asks (`ARCH_REQ_XCOMP_PERM`).
const TILE_DATA: usize = 18;
const REQUEST: usize = 0x1023;

/// Whether the processor has the tiles and the system lets this process use them.
pub(super) fn is_allowed() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| has_tiles() && is_granted())
}

fn has_tiles() -> bool {
    const TILES_AND_BF16: u32 = 1 << 24 | 1 << 22;
    let leaves = std::arch::x86_64::__cpuid(0).eax;
    leaves >= 7 && std::arch::x86_64::__cpuid_count(7, 0).edx & TILES_AND_BF16 == TILES_AND_BF16
}

#[cfg(target_os = "linux")]
fn is_granted() -> bool {
    const ARCH_PRCTL: isize = 158;
    let result: isize;
    // SAFETY: the call takes two numbers and touches no memory. The kernel overwrites rcx and r11.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") REQUEST, in("rsi") TILE_DATA,
            out("rcx") _, out("r11") _, options(nostack, nomem));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_granted() -> bool {
    false
}

/// Activations in the order of tiles: for each group of 16 rows, for each 32 elements of them, 16 rows of pairs of elements.
pub(super) struct Packed {
    words: Vec<[u32; TILE]>,
    rows: usize,
    /// Tiles of a group.
    steps: usize,
}

impl Packed {
    /// `x` is rows of `k`, a multiple of [`DEPTH`].
    pub(super) fn new(threads: &Threads, x: &[bf16], k: usize) -> Self {
        assert!(k > 0 && k.is_multiple_of(DEPTH) && x.len().is_multiple_of(k), "whole rows of whole tiles");
        let steps = k / DEPTH;
        let mut words = vec![[0; TILE]; (x.len() / k).div_ceil(ROWS) * steps];
        let groups = words.chunks_mut(steps).zip(x.chunks(ROWS * k));
        threads.for_each(x.len() >= PARALLEL_THRESHOLD, groups, |(tiles, group)| {
            for (step, tile) in tiles.iter_mut().enumerate() {
                // Rows of pairs of elements: a word is a pair, as the architecture is little endian.
                let mut rows = [0u32; TILE];
                for (row, pairs) in group.chunks_exact(k).zip(rows.chunks_exact_mut(ROWS)) {
                    bytemuck::cast_slice_mut(pairs).copy_from_slice(&row[step * DEPTH..][..DEPTH]);
                }
                *tile = transposed(&rows);
            }
        });
        Self { words, rows: x.len() / k, steps }
    }
}

/// How many rows and bytes of a row each tile has.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    first: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Sums of tiles of weights with groups of activations: for each tile of weights, one for each group.
type Sums = [[f32; TILE]; 4];

/// Multiplies a strip of weights, over all of its elements, with one or two groups of activations. The last operand but one is the
/// strip that is wanted next, or empty.
type Multiply = unsafe fn(&[bf16], [&[[u32; TILE]]; 2], &[bf16], &mut Sums);

/// What fills the four tiles of sums.
#[derive(Clone, Copy)]
struct Kernel {
    /// Tiles of 16 weight rows in a strip.
    strip: usize,
    /// Groups of 16 activation rows.
    groups: usize,
    multiply: Multiply,
}

/// Each tile of weights is used twice.
const PAIR: Kernel = Kernel { strip: 2, groups: 2, multiply: two_by_two };
/// For up to 16 activation rows.
const SINGLE: Kernel = Kernel { strip: 4, groups: 1, multiply: four_by_one };

/// `out[r * n + i] = w[i] · x[r]`, as [`Products::block`](super::Products).
pub(super) fn multiply(x: &Packed, w: &[bf16], out: &mut [f32]) {
    assert!(is_allowed(), "checked when it was chosen");
    let n = w.len() / (x.steps * DEPTH);
    // Rows that are left over are fewer than one strip of the first kernel, and are padded less by the second.
    let single = if x.rows <= ROWS { n - n % (SINGLE.strip * ROWS) } else { 0 };
    multiply_by(SINGLE, x, w, out, 0..single);
    multiply_by(PAIR, x, w, out, single..n);
    // SAFETY: releases the tiles, which nothing uses afterwards; the processor has them.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Of the weight rows in `rows`.
fn multiply_by(kernel: Kernel, x: &Packed, w: &[bf16], out: &mut [f32], rows: Range<usize>) {
    let k = x.steps * DEPTH;
    let n = w.len() / k;
    assert!(w.len() == n * k && out.len() == x.rows * n, "operands must be whole rows");
    if rows.is_empty() {
        return;
    }
    let w = &w[rows.start * k..rows.end * k];
    let strip = kernel.strip * ROWS * k;
    // Whole strips, and the last rows with zeros behind them.
    let (whole, rest) = w.split_at(w.len() / strip * strip);
    let mut padded = Vec::new();
    if !rest.is_empty() {
        padded.extend_from_slice(rest);
        padded.resize(strip, bf16::ZERO);
    }
    let strips: Vec<&[bf16]> = whole.chunks(strip).chain(padded.chunks(strip)).collect();
    let mut sums: Sums = [[0.0; TILE]; 4];
    let block = (CACHED / size_of_val(strips[0])).max(1);
    for first in (0..strips.len()).step_by(block) {
        for (at, activations) in x.words.chunks(kernel.groups * x.steps).enumerate() {
            // One group at the end of pairs stands for both.
            let second = if activations.len() > x.steps { &activations[x.steps..] } else { activations };
            for i in first..strips.len().min(first + block) {
                let next = strips.get(i + 1).filter(|_| at == 0).copied().unwrap_or_default();
                // SAFETY: the caller knows that the processor has the tiles and they are allowed; the operands have the tiles of
                // `steps` steps.
                unsafe { (kernel.multiply)(strips[i], [&activations[..x.steps], second], next, &mut sums) };
                for (tile, sums) in sums.iter().enumerate() {
                    let (weights, group) = (tile / kernel.groups, tile % kernel.groups);
                    let first = rows.start + (kernel.strip * i + weights) * ROWS;
                    let columns = first..rows.end.min(first + ROWS);
                    scatter(sums, out, columns, n, (kernel.groups * at + group) * ROWS..x.rows);
                }
            }
        }
    }
}

/// Writes sums to these columns of `out`, whose rows are `n` long: one of the first 16 of `rows` for each column of the tile.
fn scatter(sums: &[f32; TILE], out: &mut [f32], columns: Range<usize>, n: usize, rows: Range<usize>) {
    if columns.is_empty() {
        return;
    }
    let transposed = transposed(bytemuck::cast_ref(sums));
    for (sums, row) in transposed.as_chunks::<ROWS>().0.iter().zip(rows) {
        let sums: &[f32; ROWS] = bytemuck::cast_ref(sums);
        let out = &mut out[row * n..][columns.clone()];
        match out.first_chunk_mut::<ROWS>() {
            // One store, as the length is known.
            Some(out) => *out = *sums,
            None => out.copy_from_slice(&sums[..columns.len()]),
        }
    }
}

/// 16 rows of 16 words, with rows and columns exchanged.
fn transposed(rows: &[u32; TILE]) -> [u32; TILE] {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the instructions.
        return unsafe { transposed_by_vectors(rows) };
    }
    std::array::from_fn(|at| rows[at % ROWS * ROWS + at / ROWS])
}

/// # Safety
/// The processor has the instructions.
#[target_feature(enable = "avx512f")]
unsafe fn transposed_by_vectors(rows: &[u32; TILE]) -> [u32; TILE] {
    // Each step exchanges what lies apart by twice as much as in the step before: words, pairs, quarters of a vector, halves.
    // SAFETY: 16 vectors of 16 words are a tile.
    let rows: [__m512i; ROWS] =
        std::array::from_fn(|i| unsafe { _mm512_loadu_si512(rows.as_ptr().add(i * ROWS).cast()) });
    let words: [__m512i; ROWS] = std::array::from_fn(|i| match i % 2 {
        0 => _mm512_unpacklo_epi32(rows[i], rows[i + 1]),
        _ => _mm512_unpackhi_epi32(rows[i - 1], rows[i]),
    });
    // Of rows 4i to 4i + 3: the columns 4q + j of the four quarters q.
    let pairs: [__m512i; ROWS] = std::array::from_fn(|i| {
        let (four, j) = (i / 4 * 4, i % 4);
        let (upper, lower) = (words[four + j / 2], words[four + 2 + j / 2]);
        if j % 2 == 0 { _mm512_unpacklo_epi64(upper, lower) } else { _mm512_unpackhi_epi64(upper, lower) }
    });
    let mut out = [0; TILE];
    for j in 0..4 {
        let [a, b, c, d] = [0, 4, 8, 12].map(|four| pairs[four + j]);
        let (even, odd) = (
            [_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(c, d)],
            [_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(c, d)],
        );
        let columns = [
            _mm512_shuffle_i32x4::<0x88>(even[0], even[1]),
            _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]),
            _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]),
            _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]),
        ];
        for (quarter, column) in columns.into_iter().enumerate() {
            // SAFETY: column 4 · quarter + j of 16, each as long as a vector.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().add((4 * quarter + j) * ROWS).cast(), column) };
        }
    }
    out
}

/// How the kernels use the tiles.
fn configuration() -> Configuration {
    Configuration {
        palette: 1,
        first: 0,
        reserved: [0; 14],
        bytes: std::array::from_fn(|tile| if tile < 8 { 64 } else { 0 }),
        rows: std::array::from_fn(|tile| if tile < 8 { ROWS as u8 } else { 0 }),
    }
}

/// Sets up the tiles, and four sums to zero.
macro_rules! clear_sums {
    () => {
        "ldtilecfg [{configuration}]\ntilezero tmm0\ntilezero tmm1\ntilezero tmm2\ntilezero tmm3"
    };
}

/// Fetches as many bytes of what is wanted next as a step uses, in the order of memory. Takes labels 3 and 4.
macro_rules! fetch_next {
    ($bytes:literal) => {
        concat!(
            "test {next}, {next}\njz 4f\nlea {end}, [{next} + ", $bytes, "]\n3:\n",
            "prefetcht1 [{next}]\nprefetcht1 [{next} + 64]\nprefetcht1 [{next} + 128]\nprefetcht1 [{next} + 192]\n",
            "add {next}, 256\ncmp {next}, {end}\njb 3b\n4:"
        )
    };
}

/// Stores the four sums one after the other.
macro_rules! store_sums {
    () => {
        concat!(
            "tilestored [{sums} + {row}], tmm0\ntilestored [{sums} + {row} + 1024], tmm1\n",
            "tilestored [{sums} + {row} + 2048], tmm2\ntilestored [{sums} + {row} + 3072], tmm3"
        )
    };
}

/// # Safety
/// The processor has the tiles, and the process may use them. `w` is 32 rows of 32 × steps elements; each of `x` has `steps`
/// tiles; `next` is empty or as long as `w`.
unsafe fn two_by_two(w: &[bf16], x: [&[[u32; TILE]]; 2], next: &[bf16], sums: &mut Sums) {
    let steps = x[0].len();
    debug_assert!(w.len() == 2 * ROWS * DEPTH * steps && x[1].len() == steps && steps > 0);
    let configuration = configuration();
    let stride = steps * DEPTH * size_of::<bf16>();
    let upper = w.as_ptr();
    let next = if next.len() == w.len() { next.as_ptr() } else { std::ptr::null() };
    // SAFETY: the loop loads `steps` tiles of each operand, at the strides at which they are stored, and stores four tiles of
    // sums, each of 16 rows of 64 bytes. Prefetching reads nothing. The compiler uses no tiles itself.
    unsafe {
        let lower = upper.add(ROWS * DEPTH * steps);
        asm!(
            clear_sums!(),
            "2:",
            "tileloadd tmm4, [{upper} + {stride}]",
            "tileloadd tmm6, [{first} + {row}]",
            "tileloadd tmm5, [{lower} + {stride}]",
            "tileloadd tmm7, [{second} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            fetch_next!("2048"),
            "add {upper}, 64",
            "add {lower}, 64",
            "add {first}, 1024",
            "add {second}, 1024",
            "dec {steps}",
            "jnz 2b",
            store_sums!(),
            configuration = in(reg) &raw const configuration,
            stride = in(reg) stride,
            row = in(reg) 64usize,
            next = inout(reg) next => _,
            end = out(reg) _,
            upper = inout(reg) upper => _,
            lower = inout(reg) lower => _,
            first = inout(reg) x[0].as_ptr() => _,
            second = inout(reg) x[1].as_ptr() => _,
            steps = inout(reg) steps => _,
            sums = in(reg) sums.as_mut_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// # Safety
/// The processor has the tiles, and the process may use them. `w` is 64 rows of 32 × steps elements; the first of `x`, the only one that
/// is used, has `steps` tiles; `next` is empty or as long as `w`.
unsafe fn four_by_one(w: &[bf16], x: [&[[u32; TILE]]; 2], next: &[bf16], sums: &mut Sums) {
    let steps = x[0].len();
    debug_assert!(w.len() == 4 * ROWS * DEPTH * steps && steps > 0);
    let configuration = configuration();
    let stride = steps * DEPTH * size_of::<bf16>();
    let next = if next.len() == w.len() { next.as_ptr() } else { std::ptr::null() };
    // SAFETY: as above, with four tiles of weights and one of activations in each step.
    unsafe {
        let weights = |tile: usize| w.as_ptr().add(tile * ROWS * DEPTH * steps);
        asm!(
            clear_sums!(),
            "2:",
            "tileloadd tmm7, [{x} + {row}]",
            "tileloadd tmm4, [{first} + {stride}]",
            "tileloadd tmm5, [{second} + {stride}]",
            "tdpbf16ps tmm0, tmm4, tmm7",
            "tileloadd tmm6, [{third} + {stride}]",
            "tdpbf16ps tmm1, tmm5, tmm7",
            "tileloadd tmm4, [{fourth} + {stride}]",
            "tdpbf16ps tmm2, tmm6, tmm7",
            "tdpbf16ps tmm3, tmm4, tmm7",
            fetch_next!("4096"),
            "add {first}, 64",
            "add {second}, 64",
            "add {third}, 64",
            "add {fourth}, 64",
            "add {x}, 1024",
            "dec {steps}",
            "jnz 2b",
            store_sums!(),
            configuration = in(reg) &raw const configuration,
            stride = in(reg) stride,
            row = in(reg) 64usize,
            next = inout(reg) next => _,
            end = out(reg) _,
            first = inout(reg) weights(0) => _,
            second = inout(reg) weights(1) => _,
            third = inout(reg) weights(2) => _,
            fourth = inout(reg) weights(3) => _,
            x = inout(reg) x[0].as_ptr() => _,
            steps = inout(reg) steps => _,
            sums = in(reg) sums.as_mut_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a kernel of this shape computes, on any processor. Safe for all operands.
    fn plain<const GROUPS: usize>(w: &[bf16], x: [&[[u32; TILE]]; 2], _: &[bf16], sums: &mut Sums) {
        let k = x[0].len() * DEPTH;
        for (tile, sums) in sums.iter_mut().enumerate() {
            let (weights, x) = (tile / GROUPS, x[tile % GROUPS]);
            for (at, sum) in sums.iter_mut().enumerate() {
                let (row, column) = (weights * ROWS + at / ROWS, at % ROWS);
                let pairs = x.iter().flat_map(|tile| tile.chunks_exact(ROWS)).map(|pairs| pairs[column]);
                let weights = w[row * k..][..k].as_chunks::<2>().0;
                *sum = pairs
                    .zip(weights)
                    .map(|(pair, [low, high])| {
                        let x = [pair as u16, (pair >> 16) as u16].map(|x| bf16::from_bits(x).to_f32());
                        x[0] * low.to_f32() + x[1] * high.to_f32()
                    })
                    .sum();
            }
        }
    }

    #[test]
    fn a_transposed_tile_is_the_same_by_vectors_and_without() {
        let rows: [u32; TILE] = std::array::from_fn(|at| at as u32 * 0x0101_0101);
        let want = std::array::from_fn(|at| rows[at % ROWS * ROWS + at / ROWS]);
        assert_eq!(transposed(&rows), want);
    }

    #[test]
    fn tiles_cover_every_row_of_both_operands_whatever_their_numbers() {
        // Small whole numbers: their sums are exact in any order.
        let value = |i: usize| bf16::from_f32((i * 7 % 9) as f32 - 4.0);
        for [m, k, n] in [[1, 32, 1], [16, 64, 32], [17, 96, 33], [33, 32, 70], [70, 4096, 300]] {
            let x: Vec<bf16> = (0..m * k).map(value).collect();
            let w: Vec<bf16> = (0..n * k).map(|i| value(i + i / 5)).collect();
            let packed = Packed::new(&Threads::new(1, "test"), &x, k);
            let pair = Kernel { multiply: plain::<2>, ..PAIR };
            let single = Kernel { multiply: plain::<1>, ..SINGLE };
            for [first, second] in [[pair, pair], [single, single], [single, pair]] {
                let mut out = vec![f32::NAN; m * n];
                multiply_by(first, &packed, &w, &mut out, 0..n / 2);
                multiply_by(second, &packed, &w, &mut out, n / 2..n);
                for (r, out) in out.chunks_exact(n).enumerate() {
                    for (i, out) in out.iter().enumerate() {
                        let terms = x[r * k..][..k].iter().zip(&w[i * k..][..k]);
                        let want: f32 = terms.map(|(x, w)| x.to_f32() * w.to_f32()).sum();
                        assert_eq!(*out, want, "{m} x {k} x {n}: row {r}, column {i}");
                    }
                }
            }
        }
    }
}
