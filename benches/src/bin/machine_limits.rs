//! The limits of this machine's processors: bytes read from memory, and multiplications and additions.
//!
//! `machine_limits [THREADS]`, by default one thread for each processor. `decode_rate`'s passes of few sequences are bounded by
//! the first, and its prompts by the second. Each figure is the best of five runs, in which all threads work at the same time.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "an instruction that the processor must be asked for")
)]
#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use pulp::{Arch, Simd, WithSimd};

/// Bytes that all threads read together: more than the caches hold.
const READ: usize = 4 << 30;
const RUNS: usize = 5;
/// Number of sums that a thread adds to at the same time, so that no addition waits for the previous one. With two constants
/// they fit 16 registers.
const SUMS: usize = 12;
const STEPS: usize = 20_000_000;

fn main() -> Result<()> {
    let threads = match std::env::args().nth(1) {
        Some(text) => text.parse().with_context(|| format!("`{text}` is not a number of threads"))?,
        None => std::thread::available_parallelism()?.get(),
    };
    ensure!(threads > 0, "the number of threads must be at least 1");
    let (words, total) = (READ / 8 / threads, AtomicU64::new(0));
    let read = fastest(
        threads,
        || vec![1u64; words],
        |all| {
            let sum = all.iter().fold(0u64, |sum, word| sum.wrapping_add(*word));
            total.fetch_add(sum, Relaxed);
        },
    );
    ensure!(total.into_inner() == (RUNS * threads * words) as u64, "the sum of what was read is wrong");
    println!("threads                {threads:8}");
    println!("read from memory       {:8.1} GB/s", (8 * threads * words) as f64 / read.as_secs_f64() / 1e9);
    let lanes = Arch::new().dispatch(Lanes);
    let f32s = fastest(threads, || (), |()| Arch::new().dispatch(MultiplyAdd));
    show("f32, fused", threads * lanes, f32s);
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") {
        // SAFETY: the processor supports the instruction.
        let pairs = fastest(threads, || (), |()| unsafe { dot_pairs() });
        show("bf16, pairs (AVX-512)", threads * 32, pairs);
    }
    Ok(())
}

fn show(what: &str, per_step: usize, took: Duration) {
    let operations = (2 * per_step * SUMS * STEPS) as f64;
    println!("{what:22} {:8.1} GFLOP/s", operations / took.as_secs_f64() / 1e9);
}

/// Returns the time of the slowest thread in the best of five runs of `work`.
fn fastest<T>(threads: usize, prepare: impl Fn() -> T + Sync, work: impl Fn(&T) + Sync) -> Duration {
    let barrier = &Barrier::new(threads);
    let (prepare, work) = (&prepare, &work);
    let of_thread = move || {
        let prepared = prepare();
        std::array::from_fn::<Duration, RUNS, _>(|_| {
            barrier.wait();
            let started = Instant::now();
            work(&prepared);
            started.elapsed()
        })
    };
    let times: Vec<[Duration; RUNS]> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(of_thread)).collect();
        running.into_iter().map(|thread| thread.join().expect("a thread ends")).collect()
    });
    let slowest = |run: usize| times.iter().map(|times| times[run]).max().unwrap_or_default();
    (0..RUNS).map(slowest).min().unwrap_or_default()
}

/// The elements of a vector.
struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}

struct MultiplyAdd;

impl WithSimd for MultiplyAdd {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [a, b] = [0.5, 0.25].map(|value| simd.splat_f32s(black_box(value)));
        let mut sums = [simd.splat_f32s(0.0); SUMS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = simd.mul_add_f32s(*sum, a, b);
            }
        }
        black_box(sums.map(|sum| simd.reduce_sum_f32s(sum)));
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot_pairs() {
    use std::arch::x86_64::{
        __m512bh, _mm512_dpbf16_ps, _mm512_reduce_add_ps, _mm512_set1_epi16, _mm512_setzero_ps,
    };
    // 0.5 in bf16.
    // SAFETY: both types are 64 bytes of any content.
    let half: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi16(black_box(0x3F00))) };
    let mut sums = [_mm512_setzero_ps(); SUMS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, half, half);
        }
    }
    black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
}
