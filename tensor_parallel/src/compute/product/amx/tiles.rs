//! Products of tiles, and the layouts of elements that they require.
//!
//! Soundness: a [`Tiles`] exists only on a thread that has configured its tiles, and slices are as long as the tiles that are
//! read and written, which is checked.

#![expect(unsafe_code, reason = "instructions that the processor must be known to have")]

use std::arch::asm;
use std::arch::x86_64::{
    __m512i, _mm512_loadu_si512, _mm512_shuffle_i32x4, _mm512_storeu_si512, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::cell::Cell;
use std::marker::PhantomData;

use half::bf16;

/// Rows in a tile, and words in a row.
pub(in crate::compute) const SIDE: usize = 16;
/// bf16 elements in a row of a tile: the number of products that one instruction adds to each sum.
pub(in crate::compute) const DEPTH: usize = 2 * SIDE;

/// Sixteen rows of sixteen words, each two elements of bf16 or one sum.
pub(in crate::compute) type Tile = [u32; SIDE * SIDE];

/// Rows that begin `stride` elements apart. The last one may be shorter.
#[derive(Clone, Copy)]
pub(in crate::compute) struct Rows<'a> {
    pub(in crate::compute) values: &'a [bf16],
    pub(in crate::compute) stride: usize,
}

impl Rows<'_> {
    pub(in crate::compute) const NONE: Self = Self { values: &[], stride: 1 };
}

/// Products of rows with packed columns: [`Tiles`], and plain arithmetic in tests.
pub(in crate::compute) trait TileProducts {
    /// Computes the product of 32 rows of `a` with twice 16 columns of `b`. Row `i` of the product is `c[i * stride..][..32]`; it
    /// is added to the content if `adds`. Rows are as long as the tiles of `b` are deep. Meanwhile, as many elements of each row
    /// of `next`, which is a multiple of four rows or empty, are prefetched. If `fetches`, each tile of `b` is prefetched into
    /// the first-level cache two steps before its use.
    fn two_by_two(
        &self,
        a: Rows<'_>,
        b: [&[Tile]; 2],
        c: (&mut [f32], usize),
        adds: bool,
        next: Rows<'_>,
        fetches: bool,
    );

    /// Computes the product of 16 rows of `a` with 16 columns of `b`. Row `i` of the product is `c[i * 16..][..16]`. `goes_on`:
    /// the next product is that of the following 16 rows.
    fn one_by_one(&self, a: Rows<'_>, b: &[Tile], c: &mut [f32], goes_on: bool);
}

/// The tiles of the processor, configured on this thread.
pub(in crate::compute) struct Tiles {
    of_this_thread: PhantomData<*const ()>,
}

thread_local! {
    /// Number of [`Tiles`] of the thread.
    static USERS: Cell<usize> = const { Cell::new(0) };
}

/// Numbers of rows and of bytes per row of each tile.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    first: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    /// # Panics
    /// Panics if the processor has no tiles or the system does not allow them.
    pub(in crate::compute) fn new() -> Self {
        assert!(super::is_allowed(), "checked when the instruction set was chosen");
        let configuration = Configuration {
            palette: 1,
            first: 0,
            reserved: [0; 14],
            bytes: std::array::from_fn(|tile| if tile < 8 { 64 } else { 0 }),
            rows: std::array::from_fn(|tile| if tile < 8 { SIDE as u8 } else { 0 }),
        };
        USERS.set(USERS.get() + 1);
        // SAFETY: the processor has the instruction, and the operand is what it takes.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const configuration,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _, options(nostack, readonly));
        }
        Self { of_this_thread: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        USERS.set(USERS.get() - 1);
        if USERS.get() == 0 {
            // SAFETY: the processor has the instruction, and no other [`Tiles`] exists on this thread.
            unsafe {
                asm!("tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _, options(nostack, nomem));
            }
        }
    }
}

/// Returns true if `length` elements contain `rows` rows, at least two, of `width` elements. Rows begin `stride` elements apart.
/// The computation cannot overflow.
fn has_rows(length: usize, rows: usize, stride: usize, width: usize) -> bool {
    width <= length && stride <= (length - width) / (rows - 1)
}

/// Prefetch distance of [`one_by_one`](TileProducts::one_by_one) for a row, in steps.
const AHEAD: usize = 6;

/// Prefetch distance of [`two_by_two`](TileProducts::two_by_two) for a tile of columns, in steps.
const COLUMNS_AHEAD: usize = 2;

/// Prefetches the tiles of columns that are used [`COLUMNS_AHEAD`] steps later. After the last tile follow those that the next
/// product reads.
macro_rules! fetch_columns {
    () => {
        concat!(
            ".if {fetches}\n",
            ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960\n",
            "prefetcht0 [{first} + {ahead} + \\line]\n",
            "prefetcht0 [{second} + {ahead} + \\line]\n",
            ".endr\n",
            ".endif"
        )
    };
}

/// Prefetches a line of each of four rows from `{line}` on, and advances to the next four.
macro_rules! fetch_four {
    ($fetch:literal, $stride:literal) => {
        concat!(
            $fetch,
            " [{line}]\n",
            $fetch,
            " [{line} + ",
            $stride,
            "]\n",
            $fetch,
            " [{line} + 2 * ",
            $stride,
            "]\n",
            "lea {line}, [{line} + 2 * ",
            $stride,
            "]\n",
            $fetch,
            " [{line} + ",
            $stride,
            "]\n",
            "lea {line}, [{line} + 2 * ",
            $stride,
            "]\n"
        )
    };
}

/// Prefetches a line of each row from `{next}` to `{past}`, and advances both to the next line. Overwrites `{line}`. Uses labels
/// 3 and 4.
macro_rules! fetch_next {
    () => {
        concat!(
            "mov {line}, {next}\n3:\ncmp {line}, {past}\njae 4f\n",
            fetch_four!("prefetcht1", "{next_stride}"),
            "jmp 3b\n4:\n",
            "add {next}, 64\nadd {past}, 64"
        )
    };
}

impl TileProducts for Tiles {
    fn two_by_two(
        &self,
        a: Rows<'_>,
        b: [&[Tile]; 2],
        (c, c_stride): (&mut [f32], usize),
        adds: bool,
        next: Rows<'_>,
        fetches: bool,
    ) {
        let steps = b[0].len();
        assert!(steps > 0 && b[1].len() == steps && a.stride >= DEPTH * steps && c_stride >= 2 * SIDE);
        assert!(has_rows(a.values.len(), 2 * SIDE, a.stride, DEPTH * steps));
        assert!(has_rows(c.len(), 2 * SIDE, c_stride, 2 * SIDE));
        let upper = a.values.as_ptr();
        let lower = a.values[SIDE * a.stride..].as_ptr();
        let (next, next_stride, rows) =
            (next.values.as_ptr(), next.stride, next.values.len().div_ceil(next.stride));
        // A tile is loaded again directly after the last product that reads it. Otherwise products and loads hardly overlap if
        // another thread uses the core.
        macro_rules! multiply {
            ($fetches:literal) => {
                // SAFETY: the tiles are configured. The code loads `steps` tiles of each operand at the strides at which they are
                // stored, and loads and stores four tiles of sums: all within the slices, by the assertions. A prefetch may use
                // any address.
                unsafe {
                    asm!(
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "tilezero tmm2",
                        "tilezero tmm3",
                        "test {line:e}, {line:e}",
                        "jz 5f",
                        "mov {line}, {c_stride}",
                        "shl {line}, 4",
                        "add {line}, {c}",
                        "tileloadd tmm0, [{c} + {c_stride}]",
                        "tileloadd tmm1, [{c} + {c_stride} + 64]",
                        "tileloadd tmm2, [{line} + {c_stride}]",
                        "tileloadd tmm3, [{line} + {c_stride} + 64]",
                        "5:",
                        "tileloadd tmm4, [{upper} + {stride}]",
                        "tileloadd tmm6, [{first} + {row}]",
                        "tileloadd tmm5, [{lower} + {stride}]",
                        "tileloadd tmm7, [{second} + {row}]",
                        "dec {steps}",
                        "jz 6f",
                        "2:",
                        "add {upper}, 64",
                        "add {lower}, 64",
                        "add {first}, 1024",
                        "add {second}, 1024",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tdpbf16ps tmm1, tmm4, tmm7",
                        "tileloadd tmm4, [{upper} + {stride}]",
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        "tileloadd tmm6, [{first} + {row}]",
                        "tdpbf16ps tmm3, tmm5, tmm7",
                        "tileloadd tmm5, [{lower} + {stride}]",
                        "tileloadd tmm7, [{second} + {row}]",
                        fetch_columns!(),
                        fetch_next!(),
                        "dec {steps}",
                        "jnz 2b",
                        "6:",
                        fetch_next!(),
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tdpbf16ps tmm1, tmm4, tmm7",
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        "tdpbf16ps tmm3, tmm5, tmm7",
                        "mov {line}, {c_stride}",
                        "shl {line}, 4",
                        "add {line}, {c}",
                        "tilestored [{c} + {c_stride}], tmm0",
                        "tilestored [{c} + {c_stride} + 64], tmm1",
                        "tilestored [{line} + {c_stride}], tmm2",
                        "tilestored [{line} + {c_stride} + 64], tmm3",
                        stride = in(reg) a.stride * size_of::<bf16>(),
                        c_stride = in(reg) c_stride * size_of::<f32>(),
                        c = in(reg) c.as_mut_ptr(),
                        // Holds `adds` until the first product, then serves as a scratch register.
                        line = inout(reg) usize::from(adds) => _,
                        row = in(reg) 64usize,
                        fetches = const $fetches,
                        ahead = const COLUMNS_AHEAD * size_of::<Tile>(),
                        next = inout(reg) next => _,
                        next_stride = in(reg) next_stride * size_of::<bf16>(),
                        past = inout(reg) next.wrapping_add(rows * next_stride) => _,
                        upper = inout(reg) upper => _,
                        lower = inout(reg) lower => _,
                        first = inout(reg) b[0].as_ptr() => _,
                        second = inout(reg) b[1].as_ptr() => _,
                        steps = inout(reg) steps => _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    )
                }
            };
        }
        if fetches {
            multiply!(1);
        } else {
            multiply!(0);
        }
    }

    fn one_by_one(&self, a: Rows<'_>, b: &[Tile], c: &mut [f32], goes_on: bool) {
        let steps = b.len();
        assert!(steps > 0 && a.stride >= DEPTH * steps && c.len() >= SIDE * SIDE);
        assert!(has_rows(a.values.len(), SIDE, a.stride, DEPTH * steps));
        let stride = a.stride * size_of::<bf16>();
        let values = a.values.as_ptr();
        // Memory is read fastest if each of the 16 rows is a stream that is prefetched a little ahead. At the end of a row,
        // prefetching continues in the row 16 rows below.
        // SAFETY: as above, with a tile of rows and one of columns in each step.
        unsafe {
            asm!(
                "tilezero tmm0",
                "2:",
                "cmp {steps}, {AHEAD}",
                "jne 3f",
                "add {next}, {jump}",
                "3:",
                "mov {line}, {next}",
                fetch_four!("prefetcht0", "{stride}"),
                fetch_four!("prefetcht0", "{stride}"),
                fetch_four!("prefetcht0", "{stride}"),
                fetch_four!("prefetcht0", "{stride}"),
                "tileloadd tmm1, [{a} + {stride}]",
                "tileloadd tmm2, [{b} + {row}]",
                "tdpbf16ps tmm0, tmm1, tmm2",
                "add {next}, 64",
                "add {a}, 64",
                "add {b}, 1024",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {row}], tmm0",
                AHEAD = const AHEAD,
                stride = in(reg) stride,
                row = in(reg) 64usize,
                jump = in(reg) if goes_on { SIDE * stride - 64 * steps } else { 0 },
                line = out(reg) _,
                next = inout(reg) values.wrapping_byte_add(64 * AHEAD) => _,
                a = inout(reg) values => _,
                b = inout(reg) b.as_ptr() => _,
                steps = inout(reg) steps => _,
                c = in(reg) c.as_mut_ptr(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _,
                options(nostack),
            );
        }
    }
}

/// Packs up to 16 rows as columns of a product: a tile for each [`DEPTH`] of their elements, in pairs. Missing rows are zeros.
pub(in crate::compute) fn pack<'a>(rows: &(impl Iterator<Item = &'a [bf16]> + Clone), tiles: &mut [Tile]) {
    for (step, tile) in tiles.iter_mut().enumerate() {
        // Rows of pairs of elements: a word is a pair, because the architecture is little endian.
        let mut pairs = [0u32; SIDE * SIDE];
        for (to, row) in pairs.chunks_exact_mut(SIDE).zip(rows.clone()) {
            bytemuck::cast_slice_mut(to).copy_from_slice(&row[step * DEPTH..][..DEPTH]);
        }
        transpose((&pairs, SIDE), (tile, SIDE));
    }
}

/// Transposes 16 rows of 16 words. Each operand has its own stride between rows.
pub(super) fn transpose(from: (&[u32], usize), to: (&mut [u32], usize)) {
    assert!(has_rows(from.0.len(), SIDE, from.1, SIDE) && has_rows(to.0.len(), SIDE, to.1, SIDE));
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the instructions, and both hold 16 rows.
        return unsafe { transpose_by_vectors(from, to) };
    }
    for at in 0..SIDE * SIDE {
        to.0[at / SIDE * to.1 + at % SIDE] = from.0[at % SIDE * from.1 + at / SIDE];
    }
}

/// # Safety
/// The processor has the instructions, and both operands hold 16 rows.
#[target_feature(enable = "avx512f")]
unsafe fn transpose_by_vectors((from, stride): (&[u32], usize), (to, to_stride): (&mut [u32], usize)) {
    // Each step exchanges elements at twice the distance of the step before: words, pairs, quarters of a vector, halves.
    // SAFETY: a row is a vector of 16 words.
    let rows: [__m512i; SIDE] =
        std::array::from_fn(|i| unsafe { _mm512_loadu_si512(from.as_ptr().add(i * stride).cast()) });
    let words: [__m512i; SIDE] = std::array::from_fn(|i| match i % 2 {
        0 => _mm512_unpacklo_epi32(rows[i], rows[i + 1]),
        _ => _mm512_unpackhi_epi32(rows[i - 1], rows[i]),
    });
    // Of rows 4i to 4i + 3: the columns 4q + j of the four quarters q.
    let pairs: [__m512i; SIDE] = std::array::from_fn(|i| {
        let (four, j) = (i / 4 * 4, i % 4);
        let (upper, lower) = (words[four + j / 2], words[four + 2 + j / 2]);
        if j % 2 == 0 { _mm512_unpacklo_epi64(upper, lower) } else { _mm512_unpackhi_epi64(upper, lower) }
    });
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
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().add((4 * quarter + j) * to_stride).cast(), column) };
        }
    }
}

#[cfg(test)]
pub(in crate::compute) mod tests {
    use super::*;

    /// The products of tiles in plain arithmetic, for any processor.
    pub(in crate::compute) struct Plain;

    impl Plain {
        fn sum(a: Rows<'_>, b: &[Tile], row: usize, column: usize) -> f32 {
            let row = a.values[row * a.stride..][..b.len() * DEPTH].as_chunks::<2>().0;
            let pairs = b.iter().flat_map(|tile| tile.chunks_exact(SIDE)).map(|pairs| pairs[column]);
            let products = pairs.zip(row).map(|(pair, [low, high])| {
                let b = [pair as u16, (pair >> 16) as u16].map(|bits| bf16::from_bits(bits).to_f32());
                b[0] * low.to_f32() + b[1] * high.to_f32()
            });
            products.sum()
        }
    }

    impl TileProducts for Plain {
        fn two_by_two(
            &self,
            a: Rows<'_>,
            b: [&[Tile]; 2],
            c: (&mut [f32], usize),
            adds: bool,
            _: Rows<'_>,
            _: bool,
        ) {
            for (i, row) in c.0.chunks_mut(c.1).take(2 * SIDE).enumerate() {
                for (j, sum) in row[..2 * SIDE].iter_mut().enumerate() {
                    *sum = Self::sum(a, b[j / SIDE], i, j % SIDE) + if adds { *sum } else { 0.0 };
                }
            }
        }

        fn one_by_one(&self, a: Rows<'_>, b: &[Tile], c: &mut [f32], _: bool) {
            for (at, sum) in c[..SIDE * SIDE].iter_mut().enumerate() {
                *sum = Self::sum(a, b, at / SIDE, at % SIDE);
            }
        }
    }

    #[test]
    fn rows_and_columns_are_exchanged_by_vectors_and_without() {
        let (stride, to_stride) = (19, 33);
        let from: Vec<u32> =
            (0..SIDE as u32 * stride as u32).map(|at| at.wrapping_mul(0x0101_0101)).collect();
        let mut to = vec![0; SIDE * to_stride];
        transpose((&from, stride), (&mut to, to_stride));
        for at in 0..SIDE * SIDE {
            assert_eq!(to[at / SIDE * to_stride + at % SIDE], from[at % SIDE * stride + at / SIDE]);
        }
    }

    #[test]
    fn the_processors_tiles_compute_what_plain_arithmetic_does() {
        if !super::super::is_allowed() {
            return;
        }
        // Small integers: their sums are exact in any order.
        let value = |i: usize| bf16::from_f32((i * 7 % 9) as f32 - 4.0);
        for steps in [1, 2, AHEAD, 9] {
            let (stride, c_stride) = (steps * DEPTH + 32, 48);
            let values: Vec<bf16> = (0..2 * SIDE * stride).map(|i| value(i + i / 5)).collect();
            let a = Rows { values: &values, stride };
            let columns: Vec<bf16> = (0..2 * SIDE * DEPTH * steps).map(value).collect();
            let mut tiles = vec![[0; SIDE * SIDE]; 2 * steps];
            for (tiles, columns) in tiles.chunks_mut(steps).zip(columns.chunks(SIDE * DEPTH * steps)) {
                pack(&columns.chunks(DEPTH * steps), tiles);
            }
            let (first, second) = tiles.split_at(steps);
            let run = |products: &dyn TileProducts| {
                let mut sums = vec![2.0; 2 * SIDE * c_stride];
                products.two_by_two(a, [first, second], (&mut sums, c_stride), false, Rows::NONE, false);
                products.two_by_two(a, [second, first], (&mut sums, c_stride), true, a, false);
                products.two_by_two(a, [first, second], (&mut sums, c_stride), true, a, true);
                products.one_by_one(a, second, &mut sums[SIDE..], true);
                sums
            };
            // A thread may have several. Dropping the first one keeps the configuration for the others.
            let tiles = Tiles::new();
            drop(Tiles::new());
            assert_eq!(run(&tiles), run(&Plain), "{steps} steps");
        }
    }
}
