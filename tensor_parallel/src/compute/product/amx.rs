//! Products of bf16 in the tiles of Intel's AMX: 16 rows of 64 bytes. A tile of weights is read from where it is stored; the
//! activations are put in the order that the tiles want once for each product.

#![expect(unsafe_code, reason = "instructions that the caller must know the processor to have")]

use std::arch::asm;
use std::sync::OnceLock;

use half::bf16;

/// Rows of a tile.
const ROWS: usize = 16;
/// Elements of a row of a tile: as many of each sum are added by one instruction.
pub(super) const DEPTH: usize = 32;
/// Words of a tile of activations.
const TILE: usize = ROWS * ROWS;

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
    pub(super) fn new(x: &[bf16], k: usize) -> Self {
        assert!(k > 0 && k.is_multiple_of(DEPTH) && x.len().is_multiple_of(k), "whole rows of whole tiles");
        let steps = k / DEPTH;
        let mut words = Vec::with_capacity((x.len() / k).div_ceil(ROWS) * steps);
        for group in x.chunks(ROWS * k) {
            for step in 0..steps {
                let mut tile = [0; TILE];
                for (column, row) in group.chunks_exact(k).enumerate() {
                    let pairs = row[step * DEPTH..][..DEPTH].as_chunks::<2>().0;
                    for (at, [low, high]) in pairs.iter().enumerate() {
                        tile[at * ROWS + column] = u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
                    }
                }
                words.push(tile);
            }
        }
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

/// Sums of two tiles of weights with two of activations.
type Sums = [[[f32; TILE]; 2]; 2];

/// `out[r * n + i] = w[i] · x[r]`, as [`Products::block`](super::Products).
pub(super) fn multiply(x: &Packed, w: &[bf16], out: &mut [f32]) {
    let k = x.steps * DEPTH;
    let n = w.len() / k;
    assert!(w.len() == n * k && out.len() == x.rows * n, "operands must be whole rows");
    assert!(is_allowed(), "checked when it was chosen");
    let mut sums: Sums = [[[0.0; TILE]; 2]; 2];
    let mut padded = Vec::new();
    for (i, weights) in w.chunks(2 * ROWS * k).enumerate() {
        let weights = if weights.len() == 2 * ROWS * k {
            weights
        } else {
            // The last rows, with zeros behind them.
            padded.resize(2 * ROWS * k, bf16::ZERO);
            padded[..weights.len()].copy_from_slice(weights);
            &padded
        };
        for (group, activations) in x.words.chunks(2 * x.steps).enumerate() {
            // One group at the end stands for both.
            let second = if activations.len() > x.steps { &activations[x.steps..] } else { activations };
            // SAFETY: the processor has the tiles and they are allowed; the operands have the tiles of `steps` steps.
            unsafe { tiles(weights, [&activations[..x.steps], second], x.steps, &mut sums) };
            for (half, sums) in sums.iter().enumerate() {
                for (beside, sums) in sums.iter().enumerate() {
                    let (first, at) = ((2 * i + half) * ROWS, (2 * group + beside) * ROWS);
                    scatter(sums, &mut out[..], [first, n, at, x.rows]);
                }
            }
        }
    }
    // SAFETY: gives the tiles back, which no one uses any more; the processor has them.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Writes the sums of the weight rows from `first` on with the activation rows from `at` on, as far as there are such rows.
fn scatter(sums: &[f32; TILE], out: &mut [f32], [first, n, at, m]: [usize; 4]) {
    if first >= n {
        return;
    }
    let count = ROWS.min(n - first);
    for (column, r) in (at..m.min(at + ROWS)).enumerate() {
        for (i, out) in out[r * n + first..][..count].iter_mut().enumerate() {
            *out = sums[i * ROWS + column];
        }
    }
}

/// # Safety
/// The processor has the tiles, and the process may use them. `w` is 32 rows of 32 × `steps` elements; each of `x` has `steps`
/// tiles.
unsafe fn tiles(w: &[bf16], x: [&[[u32; TILE]]; 2], steps: usize, sums: &mut Sums) {
    debug_assert!(w.len() == 2 * ROWS * DEPTH * steps && x.iter().all(|x| x.len() == steps) && steps > 0);
    let configuration = Configuration {
        palette: 1,
        first: 0,
        reserved: [0; 14],
        bytes: std::array::from_fn(|tile| if tile < 8 { 64 } else { 0 }),
        rows: std::array::from_fn(|tile| if tile < 8 { ROWS as u8 } else { 0 }),
    };
    let stride = steps * DEPTH * size_of::<bf16>();
    let upper = w.as_ptr();
    // SAFETY: the loop loads `steps` tiles of each operand, at the strides at which they are stored, and stores four tiles of
    // sums, each of 16 rows of 64 bytes. The compiler uses no tiles itself.
    unsafe {
        let lower = upper.add(ROWS * DEPTH * steps);
        asm!(
            "ldtilecfg [{configuration}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{upper} + {stride}]",
            "tileloadd tmm6, [{first} + {row}]",
            "tileloadd tmm5, [{lower} + {stride}]",
            "tileloadd tmm7, [{second} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {upper}, 64",
            "add {lower}, 64",
            "add {first}, 1024",
            "add {second}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {row}], tmm0",
            "tilestored [{sums} + {row} + 1024], tmm1",
            "tilestored [{sums} + {row} + 2048], tmm2",
            "tilestored [{sums} + {row} + 3072], tmm3",
            configuration = in(reg) &raw const configuration,
            stride = in(reg) stride,
            row = in(reg) 64usize,
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
