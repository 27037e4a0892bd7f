//! The kernels on one GPU that several ranks share: they do not know the location of a peer.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use ryzanstein_config::DeviceConfig;

use super::abort_word::AbortWord;
use super::check::check;
use super::entry::Entry;
use super::kernels::{Kernels, Norm, Part, Slots};
use super::shared::{SharedMemory, Sharers};
use crate::device::{Address, Device, DeviceBuffer, Libraries, LibrarySearch};
use crate::membership::roster::Member;
use crate::membership::store::MemoryStore;
use crate::paths::gpu::{ADD_NORM_MOST, MOST_ROW, one_shot_most};
use crate::testing::member;
use crate::types::dtype::{DType, Element};
use crate::types::rank::{LocalRank, Rank};

const SOON: Duration = Duration::from_secs(60);

const REDUCTIONS: [Entry; 2] = [Entry::OneShot, Entry::TwoShot];

/// Bytes of the largest buffer.
const MOST: usize = 40 << 20;

/// One rank: kernels, a stream of its own, and memory. No rank allocates, frees or writes while another rank's kernel waits for
/// this one's: in one context that may wait for all kernels on the GPU.
struct Tester {
    kernels: Kernels,
    device: Device,
    abort: Arc<AbortWord>,
    position: usize,
    ranks: usize,
    input: DeviceBuffer,
    output: DeviceBuffer,
    all: Arc<Barrier>,
}

/// Ends the process when a rank panics: the other ranks wait for it, on the GPU and at barriers.
struct EndsTheProcess;

impl Drop for EndsTheProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::exit(101);
        }
    }
}

/// Runs `test` on `ranks` ranks. Each rank is a thread, and all use the first GPU.
fn on_one_gpu(ranks: usize, test: impl Fn(&Tester) + Sync) {
    let search = LibrarySearch::from_variables(|name| std::env::var(name).ok());
    let libraries = Arc::new(Libraries::find(&DeviceConfig::default(), &search));
    let members: Vec<Member> = Rank::all(ranks).map(member).collect();
    let (store, all) = (MemoryStore::new(), Arc::new(Barrier::new(ranks)));
    std::thread::scope(|scope| {
        for position in 0..ranks {
            let (members, store, libraries, test) = (&members, &store, &libraries, &test);
            let all = Arc::clone(&all);
            scope.spawn(move || {
                let device = Device::open(libraries, LocalRank(0), &DeviceConfig::default()).unwrap();
                let abort = Arc::new(AbortWord::new(&device).unwrap());
                let slots = Slots::new(ranks);
                let sharers =
                    Sharers { group: "test", position, members, store, deadline: Instant::now() + SOON };
                let kernels = SharedMemory::connect(&device, &sharers, Some(slots.bytes()), |memory| {
                    Kernels::new(&device, memory, position, slots, &abort)
                });
                let buffer = || DeviceBuffer::new(&device, DType::U8, MOST).unwrap();
                let (input, output) = (buffer(), buffer());
                let kernels = kernels.unwrap().unwrap();
                check(&kernels, &device, (position, ranks)).unwrap();
                abort.enable();
                let tester = Tester { kernels, device, abort, position, ranks, input, output, all };
                tester.all.wait();
                let _ends = EndsTheProcess;
                test(&tester);
                // No rank frees memory to which another rank still writes.
                tester.all.wait();
            });
        }
    });
}

/// Returns small, varied numbers of both signs, whose sums are rounded.
fn operand(rank: usize, i: usize, salt: usize) -> f32 {
    let mixed = (i * 2_654_435_761 + rank * 40_503 + salt * 97) as u32;
    (mixed >> 8) as f32 / (1 << 20) as f32 - 8.0
}

trait Float: Element {
    fn narrow(value: f32) -> Self;
    fn widen(self) -> f32;
}

macro_rules! float {
    ($type:ty, $narrow:expr, $widen:expr) => {
        impl Float for $type {
            fn narrow(value: f32) -> Self {
                $narrow(value)
            }
            fn widen(self) -> f32 {
                $widen(self)
            }
        }
    };
}
float!(f32, |value| value, |value| value);
float!(f16, f16::from_f32, f16::to_f32);
float!(bf16, bf16::from_f32, bf16::to_f32);

fn operands<T: Float>(rank: usize, count: usize, salt: usize) -> Vec<T> {
    (0..count).map(|i| T::narrow(operand(rank, i, salt))).collect()
}

impl Tester {
    fn write<T: Element>(&self, into: &DeviceBuffer, values: &[T]) {
        assert!(size_of_val(values) <= into.bytes());
        // SAFETY: it fits, and `drain` waits for it.
        unsafe { self.device.stream().copy_from_host(into.address(), bytes(values)) }.unwrap();
        self.device.stream().drain().unwrap();
    }

    fn read<T: Element>(&self, from: &DeviceBuffer, count: usize) -> Vec<T> {
        let mut values = vec![T::zeroed(); count];
        assert!(size_of_val(&values[..]) <= from.bytes());
        // SAFETY: it fits, and `drain` waits for it.
        unsafe { self.device.stream().copy_to_host(bytemuck::cast_slice_mut(&mut values), from.address()) }
            .unwrap();
        self.device.stream().drain().unwrap();
        values
    }

    /// Returns the sum in f32, neighbouring ranks in pairs, rounded once.
    fn expected<T: Float>(&self, count: usize, salt: usize) -> Vec<T> {
        let all: Vec<Vec<T>> = (0..self.ranks).map(|rank| operands(rank, count, salt)).collect();
        let sum = |i: usize| {
            let mut terms: Vec<f32> = all.iter().map(|values| values[i].widen()).collect();
            while terms.len().is_multiple_of(2) {
                terms = terms.chunks(2).map(|pair| pair[0] + pair[1]).collect();
            }
            T::narrow(terms.into_iter().reduce(|sum, term| sum + term).unwrap())
        };
        (0..count).map(sum).collect()
    }

    fn enqueue(&self, entry: Entry, part: Part, norm: Option<Norm>) {
        // SAFETY: the callers' buffers live until the stream is drained, and all ranks make the same calls.
        unsafe { self.kernels.launch_part(entry, part, norm, SOON, self.device.stream()) }.unwrap();
    }

    /// Runs an all-reduce.
    fn reduce(&self, entry: Entry, (input, output): (Address, Address), count: usize, dtype: DType) {
        self.enqueue(entry, Part { input, output, count, pitch: 0, dtype, root: 0 }, None);
    }

    /// Checks `count` elements from `offset` on, in place or not, bit for bit, and the memory around them.
    fn check<T: Float>(&self, entry: Entry, count: usize, offset: usize, in_place: bool) {
        let (salt, poison) = (count + offset, T::narrow(77.0));
        let mut memory = vec![poison; offset + count + 9];
        self.write(&self.output, &memory);
        memory[offset..offset + count].copy_from_slice(&operands::<T>(self.position, count, salt));
        self.write(&self.input, &memory);
        self.all.wait();
        let into = if in_place { &self.input } else { &self.output };
        let at = (offset * size_of::<T>()) as u64;
        let (input, output) = (self.input.address() + at, into.address() + at);
        self.reduce(entry, (input, output), count, T::DTYPE);
        let got: Vec<T> = self.read(into, memory.len());
        let what = format!("{entry:?}, {} ranks, {count} of {}, offset {offset}", self.ranks, T::DTYPE);
        let want = self.expected::<T>(count, salt);
        let differs = (0..count).find(|i| bytes(&got[offset + i..=offset + i]) != bytes(&want[*i..=*i]));
        assert!(
            differs.is_none(),
            "{what}: rank {} has {:?}",
            self.position,
            differs.map(|i| (i, got[offset + i].widen(), want[i].widen()))
        );
        let outside = got[..offset].iter().chain(&got[offset + count..]);
        assert!(outside.into_iter().all(|value| value.widen() == 77.0), "{what}: wrote outside");
    }
}

impl Tester {
    /// Checks a reduce-scatter and an all-gather of chunks of `count` elements, bit for bit.
    fn check_chunks<T: Float>(&self, count: usize, offset: usize, in_place: bool) {
        let (n, me) = (self.ranks, self.position);
        let mut memory = vec![T::narrow(77.0); offset + n * count];
        memory[offset..].copy_from_slice(&operands::<T>(me, n * count, count));
        self.write(&self.input, &memory);
        self.write(&self.output, &vec![T::narrow(77.0); offset + n * count]);
        self.all.wait();
        let (from, to) = (self.input.address(), self.output.address());
        let at = |base: Address, chunk: usize| base + ((offset + chunk * count) * size_of::<T>()) as u64;
        // In place, the chunk is at its position in the whole array.
        let output = if in_place { at(from, me) } else { at(to, me) };
        let part = Part { input: at(from, 0), output, count, pitch: count, dtype: T::DTYPE, root: 0 };
        self.enqueue(Entry::ReduceScatter, part, None);
        let part = Part { input: output, output: at(to, 0), count, pitch: count, dtype: T::DTYPE, root: 0 };
        self.enqueue(Entry::AllGather, part, None);
        let got: Vec<T> = self.read(&self.output, offset + n * count);
        let want = self.expected::<T>(n * count, count);
        let what = format!("{n} ranks, {count} of {}, offset {offset}", T::DTYPE);
        assert!(bytes(&got[offset..]) == bytes(&want), "{what}: rank {me}");
        assert!(got[..offset].iter().all(|value| value.widen() == 77.0), "{what}: wrote outside");
    }

    /// Checks a broadcast from each rank, bit for bit, and the memory around it.
    fn check_broadcast<T: Float>(&self, entry: Entry, count: usize, offset: usize, in_place: bool) {
        for root in 0..self.ranks {
            let mut memory = vec![T::narrow(77.0); offset + count + 9];
            self.write(&self.output, &memory);
            memory[offset..offset + count].copy_from_slice(&operands::<T>(self.position, count, root));
            self.write(&self.input, &memory);
            self.all.wait();
            let into = if in_place { &self.input } else { &self.output };
            let at = (offset * size_of::<T>()) as u64;
            let (input, output) = (self.input.address() + at, into.address() + at);
            let part = Part { input, output, count, pitch: 0, dtype: T::DTYPE, root: root as u32 };
            self.enqueue(entry, part, None);
            let got: Vec<T> = self.read(into, memory.len());
            memory[offset..offset + count].copy_from_slice(&operands::<T>(root, count, root));
            let what = format!("{entry:?} from {root}, {} ranks, {count} of {}", self.ranks, T::DTYPE);
            assert!(bytes(&got) == bytes(&memory), "{what}, offset {offset}: rank {}", self.position);
        }
    }

    /// Compares one kernel with a sum of terms T, an addition to a residual R and a norm on the host. The norm may differ by
    /// `tolerance`, as its squares are added in another order. Returns the bytes of the first row.
    fn check_norm<T: Float, R: Float>(
        &self,
        entry: Entry,
        [rows, columns]: [usize; 2],
        tolerance: f32,
    ) -> Vec<u8> {
        let (count, epsilon) = (rows * columns, 1e-5);
        let weight: Vec<f32> = (0..columns).map(|i| operand(9, i, 1)).collect();
        let mut residual = operands::<R>(11, count, 3);
        // One buffer holds the result, the residual and the weights.
        let mut all = vec![0x77; count * size_of::<R>()];
        let second = all.len() as u64;
        all.extend_from_slice(bytes(&residual));
        let third = all.len() as u64;
        all.extend_from_slice(bytes(&weight));
        self.write(&self.output, &all);
        self.write(&self.input, &operands::<T>(self.position, count, 5));
        self.all.wait();
        let (input, output) = (self.input.address(), self.output.address());
        let (residual_at, weight_at, narrow) = (output + second, output + third, R::DTYPE as u64);
        let columns_of = columns as u32;
        let norm = Norm { residual: residual_at, weight: weight_at, columns: columns_of, epsilon, narrow };
        self.enqueue(entry, Part { input, output, count, pitch: 0, dtype: T::DTYPE, root: 0 }, Some(norm));
        let got: Vec<R> = self.read(&self.output, 2 * count);
        let shape = format!("{rows} rows of {columns} {} and {}", T::DTYPE, R::DTYPE);
        let what = format!("{entry:?}, {} ranks, {shape}", self.ranks);
        for (residual, sum) in residual.iter_mut().zip(self.expected::<T>(count, 5)) {
            *residual = R::narrow(residual.widen() + R::narrow(sum.widen()).widen());
        }
        assert!(bytes(&got[count..]) == bytes(&residual), "{what}: the residual");
        for (row, got) in residual.chunks(columns).zip(got.chunks(columns)) {
            let squares: f64 = row.iter().map(|x| f64::from(x.widen()).powi(2)).sum();
            let scale = (1.0 / (squares / columns as f64 + f64::from(epsilon)).sqrt()) as f32;
            for ((x, weight), got) in row.iter().zip(&weight).zip(got) {
                let want = x.widen() * scale * weight;
                assert!(
                    (got.widen() - want).abs() <= tolerance * want.abs() + 1e-6,
                    "{what}: {} for {want}",
                    got.widen()
                );
            }
        }
        bytes(&got[..columns]).to_vec()
    }
}

fn bytes<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

#[test]
#[ignore = "needs a GPU"]
fn every_length_type_and_alignment_has_the_bits_of_sums_of_pairs_of_ranks() {
    for ranks in 2..=8 {
        on_one_gpu(ranks, |tester| {
            for entry in REDUCTIONS {
                for count in (1..=67).chain([255, 256, 257, 1023, 4099, 16_000]) {
                    let (offset, in_place) = (count % 3, count % 2 == 0);
                    tester.check::<bf16>(entry, count, offset, in_place);
                    tester.check::<f16>(entry, count, 0, !in_place);
                    tester.check::<f32>(entry, count, offset, in_place);
                }
            }
        });
    }
}

#[test]
#[ignore = "needs a GPU"]
fn lengths_up_to_4099_and_the_most_of_each_kernel() {
    on_one_gpu(2, |tester| {
        for entry in REDUCTIONS {
            for count in 1..=4099 {
                tester.check::<bf16>(entry, count, count % 5, count % 2 == 0);
            }
        }
        tester.check::<f32>(Entry::OneShot, one_shot_most(2) / 4, 0, true);
        tester.check::<f32>(Entry::OneShot, one_shot_most(2) / 4 - 1, 3, false);
        tester.check::<bf16>(Entry::TwoShot, 16 << 20, 0, true);
        tester.check::<bf16>(Entry::TwoShot, (16 << 20) - 5, 1, false);
        tester.check_broadcast::<bf16>(Entry::Broadcast, (16 << 20) - 5, 1, false);
        tester.check_broadcast::<bf16>(Entry::ScatterGather, 8 << 20, 0, true);
    });
}

/// NaNs, infinities and zeros of both signs, and the words that mark an empty slot.
#[test]
#[ignore = "needs a GPU"]
fn no_value_is_taken_for_an_empty_slot() {
    on_one_gpu(2, |tester| {
        let words =
            [u32::MAX, 0, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0xffff_0000, 0x0000_ffff];
        let values: Vec<f32> = words.iter().cycle().take(999).map(|word| f32::from_bits(*word)).collect();
        for entry in REDUCTIONS {
            tester.write(&tester.input, &values);
            tester.all.wait();
            let (address, count) = (tester.input.address(), values.len());
            for _ in 0..3 {
                tester.reduce(entry, (address, address), count, DType::F32);
            }
            let got: Vec<f32> = tester.read(&tester.input, count);
            for (i, (got, value)) in got.iter().zip(&values).enumerate() {
                let want = 8.0 * value;
                assert!(*got == want || (got.is_nan() && want.is_nan()), "{entry:?}, {i}: {got} of {value}");
            }
        }
    });
}

#[test]
#[ignore = "needs a GPU"]
fn chunks_are_gathered_and_reduced_at_every_alignment() {
    for ranks in [2, 3, 4, 8] {
        on_one_gpu(ranks, |tester| {
            for count in (1..=33).chain([255, 1024, 4099, 300_000]) {
                tester.check_chunks::<bf16>(count, count % 3, false);
                tester.check_chunks::<f32>(count, count % 2, true);
            }
        });
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_rank_broadcasts_any_length_at_every_alignment() {
    for ranks in [2, 3, 4, 5, 8] {
        on_one_gpu(ranks, |tester| {
            for entry in [Entry::Broadcast, Entry::ScatterGather] {
                for count in (1..=33).chain([255, 1024, 4099, 300_000]) {
                    tester.check_broadcast::<bf16>(entry, count, count % 3, false);
                    tester.check_broadcast::<f32>(entry, count, count % 2, true);
                }
            }
        });
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_sum_is_added_and_normalised_in_one_kernel() {
    for ranks in [2, 3, 4, 8] {
        on_one_gpu(ranks, |tester| {
            for (rows, columns) in [
                (1, 8),
                (3, 64),
                (5, 200),
                (1, 4096),
                (7, 4096),
                (64, 2048),
                (200, 1024),
                (2, 8192),
                (2, 5120),
                (3, 32_768),
            ] {
                for (entry, most) in
                    [(Entry::AddNorm, one_shot_most(ranks)), (Entry::TwoShotAddNorm, ADD_NORM_MOST)]
                {
                    let shape = [rows, columns];
                    if 2 * rows * columns <= most {
                        tester.check_norm::<bf16, bf16>(entry, shape, 0.004);
                        tester.check_norm::<f16, f16>(entry, shape, 0.001);
                    }
                    if 4 * columns <= MOST_ROW && 4 * rows * columns <= most {
                        tester.check_norm::<f32, f32>(entry, shape, 1e-6);
                        tester.check_norm::<f32, f16>(entry, shape, 0.001);
                        let row = tester.check_norm::<f32, bf16>(entry, shape, 0.004);
                        let alone = tester.check_norm::<f32, bf16>(Entry::AddNorm, [1, columns], 0.004);
                        assert!(row == alone, "{entry:?}, {ranks} ranks: a row of {shape:?} alone");
                    }
                }
            }
        });
    }
}

/// A kernel that gave up pushes and stores no result, and neither do the calls after it.
#[test]
#[ignore = "needs a GPU"]
fn a_call_that_is_given_up_stores_nothing_and_those_behind_it_neither() {
    const CHUNK: usize = 2500;
    on_one_gpu(2, |tester| {
        if tester.position == 1 {
            return;
        }
        // This rank's own contribution to the output of an all-gather is already there.
        let ones = vec![1.0f32; 2 * CHUNK];
        tester.write(&tester.input, &ones);
        tester.write(&tester.output, &ones);
        let (input, output) = (tester.input.address(), tester.output.address());
        let all = || {
            for (entry, count) in [
                (Entry::OneShot, 2 * CHUNK),
                (Entry::TwoShot, 2 * CHUNK),
                (Entry::ReduceScatter, CHUNK),
                (Entry::AllGather, CHUNK),
                (Entry::Broadcast, 2 * CHUNK),
                (Entry::ScatterGather, 2 * CHUNK),
            ] {
                let part = Part { input, output, count, pitch: CHUNK, dtype: DType::F32, root: 1 };
                tester.enqueue(entry, part, None);
            }
        };
        all();
        std::thread::sleep(Duration::from_millis(100));
        tester.abort.set();
        for _ in 0..2 {
            let got: Vec<f32> = tester.read(&tester.output, 2 * CHUNK);
            assert!(got.iter().all(|value| *value == 1.0), "the first two of all: {:?}", &got[..2]);
            all();
        }
        // Its results are lost, but it ends, and so do the blocks that wait for it in its cluster.
        let (columns, count) = (5120, 5120);
        let norm = Norm { residual: output, weight: output, columns, epsilon: 1e-5, narrow: 0 };
        let part = Part { input, output: input, count, pitch: 0, dtype: DType::F32, root: 0 };
        let memory = vec![1.0f32; count];
        tester.write(&tester.input, &memory);
        tester.write(&tester.output, &memory);
        let started = Instant::now();
        tester.enqueue(Entry::AddNorm, part, Some(norm));
        tester.enqueue(Entry::TwoShotAddNorm, part, Some(norm));
        tester.device.stream().drain().unwrap();
        assert!(started.elapsed() < Duration::from_secs(2), "it ended after {:?}", started.elapsed());
    });
}

/// Each rank uses the position of the other: the gathered data are in the wrong order.
#[test]
#[ignore = "needs a GPU"]
fn a_wrong_value_is_found_before_the_first_call_and_its_path_named() {
    on_one_gpu(2, |tester| {
        let found = check(&tester.kernels, &tester.device, (1 - tester.position, 2)).unwrap_err();
        assert!(found.contains("(reduce_scatter of 1000 f32) failed: element "), "{found}");
    });
}

#[test]
#[ignore = "needs a GPU"]
fn a_million_calls_of_changing_size_keep_in_step() {
    on_one_gpu(2, |tester| {
        let count = 70_000;
        let ones = vec![1.0f32; count];
        let zeros = vec![0.0f32; count];
        let mut seed = 1u32;
        for round in 0..2000 {
            let (memory, scratch) = (&tester.input, &tester.output);
            tester.write(memory, &ones);
            tester.write(scratch, &zeros);
            tester.all.wait();
            for call in 0..500 {
                // It is the same on all ranks.
                seed ^= seed << 13;
                seed ^= seed >> 17;
                seed ^= seed << 5;
                let length = 1 + seed as usize % if call % 10 == 0 { count } else { 3000 };
                let addresses = (memory.address(), scratch.address());
                // Broadcasts and sums alternate in the same slots.
                if call % 7 == 0 {
                    let (input, output, root) = (memory.address(), memory.address(), seed % 2);
                    let part = Part { input, output, count: length, pitch: 0, dtype: DType::F32, root };
                    tester.enqueue(
                        [Entry::Broadcast, Entry::ScatterGather][seed as usize / 3 % 2],
                        part,
                        None,
                    );
                }
                tester.reduce(REDUCTIONS[seed as usize / 7 % 2], addresses, length, DType::F32);
            }
            tester.reduce(REDUCTIONS[round % 2], (memory.address(), memory.address()), count, DType::F32);
            let got: Vec<f32> = tester.read(memory, count);
            assert!(got.iter().all(|value| *value == 2.0), "round {round}");
            let got: Vec<f32> = tester.read(scratch, count);
            assert!(got.iter().all(|value| *value == 2.0 || *value == 0.0), "round {round}");
        }
    });
}

#[test]
#[ignore = "needs a GPU"]
fn a_wait_for_a_rank_that_never_calls_ends_when_it_is_told_to() {
    on_one_gpu(3, |tester| {
        if tester.position == 2 {
            return;
        }
        let memory = &tester.input;
        tester.write(memory, &vec![1.0f32; 5000]);
        for entry in REDUCTIONS {
            tester.reduce(entry, (memory.address(), memory.address()), 5000, DType::F32);
        }
        std::thread::sleep(Duration::from_millis(200));
        let told = Instant::now();
        tester.abort.set();
        tester.device.stream().drain().unwrap();
        assert!(told.elapsed() < Duration::from_secs(2), "the kernels ended after {:?}", told.elapsed());
    });
}

#[test]
#[ignore = "needs a GPU"]
fn a_wait_gives_up_by_itself_at_last() {
    on_one_gpu(2, |tester| {
        if tester.position == 1 {
            return;
        }
        let memory = &tester.input;
        tester.write(memory, &[1.0f32; 100]);
        let (input, output) = (memory.address(), memory.address());
        let part = Part { input, output, count: 100, pitch: 0, dtype: DType::F32, root: 0 };
        // SAFETY: the buffer lives until the stream is drained below.
        unsafe {
            let patience = Duration::from_millis(300);
            tester.kernels.launch_part(Entry::OneShot, part, None, patience, tester.device.stream())
        }
        .unwrap();
        assert!(!tester.abort.is_set());
        tester.device.stream().drain().unwrap();
        assert!(tester.abort.is_set(), "the watchdog sees it");
    });
}
