//! Measures a collective.
//!
//! Each call has its own operands; receiving memory is poisoned first, and every element of every result is compared. A call's
//! latency is that of its slowest rank. [`Bench`] abstracts the differences between CPU and GPU: memory and clock.

mod collective;
mod gpu;
mod host;
mod pattern;
mod samples;
mod statistics;

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{BufferMut, DType, Error, ProcessGroup, ReduceOp};
use serde::{Deserialize, Serialize};

pub use collective::{CallBuffers, Collective, CollectiveForm, UnknownCollective};
pub use gpu::Gpu;
pub use host::{Host, HostBuffer};
use pattern::{Patterns, longest_chain};
pub use statistics::{Summary, median, slowest, summary};

/// Memory for collectives, and a clock that times them.
pub trait Bench {
    /// A buffer of elements. Operands are written and results read through the bench.
    type Memory: BufferMut;

    /// Returns the number of buffers of `bytes` bytes that the calls rotate over.
    fn slots(&self, bytes: usize) -> usize;

    /// Returns true if only a whole run can be timed, not its calls. Then each run uses all slots, and makes as many calls on
    /// each as keep its values exact.
    fn times_whole_runs(&self) -> bool {
        false
    }

    /// Returns the number of calls at the start of each run that are made and checked but not timed, so that the ranks are
    /// synchronised when the clock starts. It is less than [`slots`](Self::slots).
    fn untimed_calls(&self) -> usize {
        0
    }

    /// Returns true if several threads fill and compare buffers. False on host memory, where the ranks themselves use all CPUs.
    fn checks_in_parallel(&self) -> bool {
        false
    }

    /// Allocates a buffer.
    ///
    /// # Errors
    /// Fails when there is not enough memory.
    fn allocate(&mut self, dtype: DType, elements: usize) -> Result<Self::Memory, Error>;

    /// Lets `content` write the whole buffer.
    ///
    /// # Errors
    /// Returns the errors of a copy to the device.
    fn write(&mut self, memory: &mut Self::Memory, content: &mut dyn FnMut(&mut [u8])) -> Result<(), Error>;

    /// Lets `look` read the whole buffer.
    ///
    /// # Errors
    /// Returns the errors of a copy from the device.
    fn read(&mut self, memory: &Self::Memory, look: &mut dyn FnMut(&[u8])) -> Result<(), Error>;

    /// Times `call` on each slot in order, `chain` times each, and returns when all are complete. Returns one sample for each
    /// slot after the untimed ones, or a single sample if only whole runs can be timed.
    ///
    /// # Errors
    /// Returns the errors of the calls.
    fn time(
        &mut self,
        group: &mut ProcessGroup,
        slots: &mut [CallBuffers<Self::Memory>],
        chain: usize,
        call: Call<'_, Self::Memory>,
    ) -> Result<Vec<Sample>, Error>;
}

/// Makes a call on a slot's buffers.
pub type Call<'a, M> = &'a mut dyn FnMut(&mut ProcessGroup, &mut CallBuffers<M>) -> Result<(), Error>;

/// One timing on one rank.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Microseconds until the call was complete.
    pub latency_us: f64,
    /// Microseconds until the call returned to the host.
    pub host_us: f64,
}

/// The minimum number of samples of a figure, unless fewer calls are requested.
pub const MIN_SAMPLES: usize = 5;

/// Maximum number of buffers that calls on host memory rotate over.
const HOST_SLOTS: usize = 4;

/// A case to measure.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Case {
    /// The operation.
    pub what: Collective,
    /// The reduction, for operations that reduce.
    pub reduction: ReduceOp,
    /// The element type.
    pub dtype: DType,
    /// Bytes of the whole array; rounded down to whole elements and chunks.
    pub bytes: usize,
    /// Untimed calls before the timed ones. Their values are checked. If there are fewer than buffers, some buffers stay cold.
    pub warmup: usize,
    /// True if input and output are separate buffers.
    pub out_of_place: bool,
    /// The minimum number of timed calls. If only whole runs can be timed, at least [`MIN_SAMPLES`] of them, if that many calls are
    /// requested.
    pub iterations: usize,
}

impl Case {
    /// Creates a case with f32 elements, the sum as reduction, and a warm-up that suits the number of calls.
    pub fn new(what: Collective, bytes: usize, iterations: usize) -> Self {
        // Each buffer is warm before the first timed call.
        let warmup = (iterations / 10).clamp(HOST_SLOTS, 20);
        let out_of_place = what.is_out_of_place();
        Self { what, reduction: ReduceOp::Sum, dtype: DType::F32, bytes, warmup, out_of_place, iterations }
    }

    /// Returns the operation and its form.
    pub const fn form(&self) -> CollectiveForm {
        CollectiveForm { what: self.what, out_of_place: self.out_of_place }
    }

    /// Returns the number of elements of a chunk, or of the vector: at least one.
    pub fn count(&self, world_size: usize) -> usize {
        let parts = if self.what.is_chunked() { world_size } else { 1 };
        (self.bytes / self.dtype.size() / parts).max(1)
    }
}

/// The result of a measurement; the same on all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Figures {
    /// Bytes of the whole array.
    pub bytes: usize,
    /// Latency of the slowest rank of each call.
    pub latency: Summary,
    /// Median of the time until the slowest rank's call returned to the host, in microseconds.
    pub host_us: f64,
    /// The path of the calls on rank 0, which takes part in every operation; `None` without a path.
    pub path: Option<Path>,
    /// Wrong elements, over all ranks and calls, warm-up included.
    pub errors: u64,
}

/// Runs [`measure`] in the memory that the group's calls work on. `graph` (GPUs only) replays the calls from a CUDA graph.
///
/// # Errors
/// Returns the errors of [`measure`].
pub fn measure_group(group: &mut ProcessGroup, graph: bool, case: &Case) -> Result<Figures, Error> {
    match group.device().cloned() {
        Some(device) => measure(group, &mut Gpu::new(device, graph), case),
        None => measure(group, &mut Host, case),
    }
}

/// Measures one case. Every rank calls this with the same case and gets the same figures.
///
/// # Errors
/// Returns the errors of the collectives and of the memory; [`Error::Configuration`] when no exact check is possible.
pub fn measure<B: Bench>(group: &mut ProcessGroup, bench: &mut B, case: &Case) -> Result<Figures, Error> {
    measure_calls(group, bench, case, &mut |group, slot| case.what.call(group, slot, case.reduction))
}

/// Measures one case as [`measure`] does, with calls that `make` makes.
pub(crate) fn measure_calls<B: Bench>(
    group: &mut ProcessGroup,
    bench: &mut B,
    case: &Case,
    make: Call<'_, B::Memory>,
) -> Result<Figures, Error> {
    let (n, rank) = (group.world_size(), group.rank().index());
    let longest = longest_chain(case.what, case.reduction, case.dtype, n);
    let chain = if bench.times_whole_runs() && !case.out_of_place { longest } else { 1 };
    let patterns = Patterns::new(case.what, case.reduction, case.dtype, (rank, n), case.count(n), chain)?
        .out_of_place(case.out_of_place)
        .on_threads(bench.checks_in_parallel());
    let bytes = patterns.elements() * case.dtype.size();
    let untimed_calls = bench.untimed_calls();
    // If only whole runs can be timed, the first is untimed: it does the initialisation of the first call.
    let warmup = case.warmup.max(usize::from(bench.times_whole_runs()));
    let most = case.iterations.max(warmup).max(1) + untimed_calls;
    let slots = bench.slots(bytes).clamp(1 + untimed_calls, most);
    let mut slots: Vec<CallBuffers<B::Memory>> = (0..slots)
        .map(|_| {
            let input = patterns.input_elements().map(|elements| bench.allocate(case.dtype, elements));
            Ok(CallBuffers {
                input: input.transpose()?,
                buffer: bench.allocate(case.dtype, patterns.buffer_elements())?,
            })
        })
        .collect::<Result<_, Error>>()?;

    let mut samples = Vec::with_capacity(case.iterations);
    let (mut warm, mut timed, mut calls, mut errors) = (0, 0, 0, 0);
    let mut path = None;
    while warm < warmup || timed < case.iterations || samples.len() < MIN_SAMPLES.min(case.iterations) {
        // A run has either warm-up calls or timed ones.
        let is_warm_up = warm < warmup;
        let left = if is_warm_up { warmup - warm } else { case.iterations.saturating_sub(timed).max(1) };
        // A shorter run would have a different share of overhead in its single sample.
        let whole = bench.times_whole_runs();
        let run = if whole { slots.len() } else { slots.len().min(left + untimed_calls) };
        let slots = &mut slots[..run];
        for (call, slot) in (calls..).zip(slots.iter_mut()) {
            if let Some(input) = &mut slot.input {
                bench.write(input, &mut |bytes| patterns.fill_input(bytes, call))?;
            }
            bench.write(&mut slot.buffer, &mut |bytes| patterns.fill_buffer(bytes, call))?;
        }
        let call_one = &mut |group: &mut ProcessGroup, slot: &mut CallBuffers<B::Memory>| {
            make(group, slot)?;
            if path.is_none() {
                path = group.last_call().and_then(|call| call.path);
            }
            Ok(())
        };
        let run_samples = bench.time(group, slots, chain, call_one)?;
        let counted = (run - untimed_calls) * chain;
        if is_warm_up {
            warm += counted;
        } else {
            timed += counted;
            samples.extend(run_samples);
        }
        for (call, slot) in (calls..).zip(slots.iter()) {
            bench.read(&slot.buffer, &mut |bytes| errors += patterns.wrong(bytes, call, chain))?;
        }
        calls += run;
    }
    samples::gather(group, bytes, samples, path, errors)
}

#[cfg(test)]
mod tests;
