//! The kernels, their slots, and their number of blocks.

use std::sync::Arc;
use std::time::Duration;

use super::abort_word::AbortWord;
use super::entry::{Entry, Region};
use super::shape::{HOPPER, MOST_THREADS, VECTOR, row_shape, shape};
use super::shared::SharedMemory;
use crate::backend::call::{AddNorm, Call};
use crate::device::buffer::ViewMut;
use crate::device::{Address, Argument, Device, DeviceBuffer, DeviceError, Kernel, Launch, Stream};
use crate::paths::gpu::{MOST_ROW, PEER_TYPES, TWO_SHOT_PART, chunk_most, one_shot_most};
use crate::paths::{Path, PeerAlgorithm};
use crate::types::dtype::DType;
use crate::types::operation::Operation;

const SOURCE: &str =
    concat!(include_str!("vectors.cu"), include_str!("collectives.cu"), include_str!("add_norm.cu"));
/// Timeout of a kernel that nothing ends. The watchdog ends it at the deadline of the call, also in a graph.
const PATIENCE: Duration = Duration::from_secs(60 * 60);
/// The same during the check of the kernels.
pub(super) const CHECKED: Duration = Duration::from_secs(5);

/// The layout of the slots of a rank, for a world size: those of arrays, then those of chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Slots {
    /// Bytes of a slot for an array.
    array: usize,
    /// Bytes of a slot for a chunk.
    chunk: usize,
    ranks: usize,
}

impl Slots {
    pub(super) const fn new(ranks: usize) -> Self {
        Self { array: one_shot_most(ranks), chunk: chunk_most(ranks), ranks }
    }

    /// Returns the bytes of a slot.
    const fn capacity(self, region: Region) -> usize {
        match region {
            Region::Arrays => self.array,
            Region::Chunks => self.chunk,
        }
    }

    /// Returns the start of a region.
    const fn start(self, region: Region) -> usize {
        match region {
            Region::Arrays => 0,
            // Two phases of one slot for each source.
            Region::Chunks => 2 * self.ranks * self.array,
        }
    }

    /// Returns the total number of bytes. There are scattered chunks and gathered chunks.
    pub(super) const fn bytes(self) -> usize {
        self.start(Region::Chunks) + 4 * self.ranks * self.chunk
    }

    /// Returns the maximum number of bytes of a launch: of the array, or of one rank's chunk.
    const fn most(self, entry: Entry) -> usize {
        match entry {
            Entry::OneShot | Entry::AddNorm => self.array,
            Entry::TwoShot => TWO_SHOT_PART,
            // Its data use the slots of all sources.
            Entry::Broadcast => self.ranks * self.chunk,
            // All ranks except the root own a chunk.
            Entry::ScatterGather => (self.ranks - 1) * self.chunk,
            // Its rows are divided among the ranks, and one rank has one more.
            Entry::TwoShotAddNorm => self.ranks * (self.chunk - MOST_ROW),
            Entry::ReduceScatter | Entry::AllGather => self.chunk,
        }
    }
}

/// The kernels of one rank of a group.
pub(super) struct Kernels {
    device: Device,
    memory: SharedMemory,
    slots: Slots,
    position: usize,
    /// For each region, the state of each block after the earlier calls: [`state_words`](Self::state_words) words.
    states: DeviceBuffer,
    /// Number of multiprocessors for this rank.
    multiprocessors: u32,
    /// Number of blocks of a launch that fit a multiprocessor, by entry.
    resident: [u32; Entry::ALL.len()],
    abort: Arc<AbortWord>,
    /// The kernels by type, in the order of [`PEER_TYPES`], and by entry.
    loaded: Vec<Vec<Kernel>>,
}

/// Maximum number of blocks of a launch on a multiprocessor.
const MOST_RESIDENT: u32 = 4;

impl Kernels {
    /// Compiles the kernels and makes their counters.
    ///
    /// # Errors
    /// Those of the compiler and of the GPU.
    pub(super) fn new(
        device: &Device,
        memory: SharedMemory,
        position: usize,
        slots: Slots,
        abort: &Arc<AbortWord>,
    ) -> Result<Self, DeviceError> {
        let load = |dtype: &DType| {
            let options = [("KIND", *dtype as usize), ("RANKS", slots.ranks), ("RANK", position)]
                .map(|(n, v)| format!("-D{n}={v}"));
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let module = device.kernels().module("collectives.cu", SOURCE, &options)?;
            Entry::ALL.iter().map(|entry| module.kernel(entry.name())).collect()
        };
        let loaded: Vec<Vec<Kernel>> = PEER_TYPES.iter().map(load).collect::<Result<_, DeviceError>>()?;
        // Blocks wait for blocks of other GPUs, so all blocks of a launch must run at once. Two groups must fit on the GPU
        // together, so each uses half of it. Rows use one block per multiprocessor, which long ones fill.
        let mut resident = [1; Entry::ALL.len()];
        for (index, entry) in Entry::ALL.into_iter().enumerate().filter(|(_, entry)| !entry.has_norm()) {
            let fits = loaded.iter().map(|kernels| kernels[index].blocks_per_multiprocessor(MOST_THREADS, 0));
            let fit = fits.collect::<Result<Vec<_>, _>>()?.into_iter().min().unwrap_or_default();
            resident[entry as usize] = (fit / 2).clamp(1, MOST_RESIDENT);
        }
        // In tests, ranks share a GPU. Then half of it stays free, as clusters do not fit everywhere.
        let share = if memory.ranks_here() == 1 { 1 } else { 2 * memory.ranks_here() };
        let multiprocessors = (device.info().multiprocessors / share).max(8);
        let words = 2 * MOST_RESIDENT * multiprocessors;
        let states = DeviceBuffer::from_slice(device, &vec![0u32; words as usize])?;
        let abort = Arc::clone(abort);
        let kernels = Self {
            device: device.clone(),
            memory,
            slots,
            position,
            states,
            multiprocessors,
            resident,
            abort,
            loaded,
        };
        // Loading a kernel may wait for the GPU, also for kernels that wait for this rank. So each kernel is loaded now, by a
        // launch for no elements: no rank has pushed data yet, and all ranks count the same launches.
        for dtype in PEER_TYPES {
            for entry in Entry::ALL {
                let nothing = Part { input: 0, output: 0, count: 0, pitch: 0, dtype, root: 0 };
                let norm = entry.has_norm().then_some(Norm { columns: VECTOR as u32, ..Norm::default() });
                // SAFETY: the kernels read and write no element.
                unsafe { kernels.launch_part(entry, nothing, norm, PATIENCE, device.stream()) }?;
            }
        }
        device.stream().drain()?;
        Ok(kernels)
    }

    /// Returns the words of state of a region: one set for each possible block of a launch.
    const fn state_words(&self) -> u32 {
        MOST_RESIDENT * self.multiprocessors
    }

    /// Returns true if a kernel has given up.
    pub(super) fn gave_up(&self) -> bool {
        self.abort.is_written()
    }

    /// Enqueues a call. Returns its path.
    ///
    /// # Safety
    /// As [`PeerMemory::launch`](super::PeerMemory::launch). Every rank makes the same calls in the same order, and this one on one
    /// stream at a time.
    pub(super) unsafe fn launch(
        &self,
        algorithm: PeerAlgorithm,
        call: &Call<'_>,
        stream: &Stream,
    ) -> Result<Path, DeviceError> {
        let (dtype, count) = (call.fingerprint.dtype, call.fingerprint.count);
        let buffer = call.output.as_ref().and_then(ViewMut::device).map_or(0, |view| view.address);
        let input = call.input.and_then(|view| view.device()).map(|view| view.address);
        let bytes = count * dtype.size();
        // In place, this rank's chunk is among the chunks of all ranks.
        let own = buffer + (self.position * bytes) as u64;
        let (entry, input, output) = match call.fingerprint.operation {
            Operation::AllGather => (Entry::AllGather, input.unwrap_or(own), buffer),
            Operation::ReduceScatter(_) => {
                (Entry::ReduceScatter, input.unwrap_or(buffer), if call.in_place { own } else { buffer })
            }
            operation => {
                let is_broadcast = matches!(operation, Operation::Broadcast { .. });
                let entry = match (&call.add_norm, algorithm) {
                    (Some(_), PeerAlgorithm::OneShot) if bytes <= self.slots.array => Entry::AddNorm,
                    (Some(_), _) => Entry::TwoShotAddNorm,
                    (None, PeerAlgorithm::OneShot) if is_broadcast => Entry::Broadcast,
                    (None, PeerAlgorithm::TwoShot) if is_broadcast => Entry::ScatterGather,
                    (None, PeerAlgorithm::OneShot) => Entry::OneShot,
                    (None, PeerAlgorithm::TwoShot) => Entry::TwoShot,
                };
                (entry, input.unwrap_or(buffer), buffer)
            }
        };
        let root = call.fingerprint.operation.root().map_or(0, |root| root.0);
        let most = self.slots.most(entry) / dtype.size();
        // A part is whole rows.
        let most = call.add_norm.as_ref().map_or(most, |norm| most - most % norm.weight.count());
        let out_size = call.output.as_ref().map_or(dtype, ViewMut::dtype).size();
        // An empty call launches nothing: phases change only with calls in which ranks communicate.
        for start in (0..count).step_by(most) {
            let (input, output) = (input + (start * dtype.size()) as u64, output + (start * out_size) as u64);
            let norm = call.add_norm.as_ref().map(|norm| Norm::of(norm, start));
            let part = Part { input, output, count: most.min(count - start), pitch: count, dtype, root };
            // SAFETY: a part of the buffers, by the caller's promise.
            unsafe { self.launch_part(entry, part, norm, PATIENCE, stream) }?;
        }
        Ok(entry.path())
    }

    /// Enqueues one launch of a kernel.
    ///
    /// # Safety
    /// As [`launch`](Self::launch), for as many elements as its slots hold; for none only before the first call, on all ranks.
    /// There is a norm if [`Entry::has_norm`], and `count` elements are whole rows of it.
    pub(super) unsafe fn launch_part(
        &self,
        entry: Entry,
        part: Part,
        norm: Option<Norm>,
        patience: Duration,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let (region, slots) = (entry.region(), self.slots);
        let start = slots.start(region) as u64;
        // As `struct Call` of the kernels: every field has eight bytes, except the number of blocks and the root, which have four
        // each.
        let mut arguments = Vec::with_capacity(ARGUMENTS);
        arguments.extend([part.input, part.output, part.count as u64, part.pitch as u64]);
        arguments.extend(self.memory.addresses().iter().map(|address| address + start));
        let all_states = self.states.address();
        let states = all_states + u64::from(region as u32 * self.state_words()) * size_of::<u32>() as u64;
        arguments.extend([
            slots.capacity(region) as u64,
            states,
            u64::from(self.state_words()) | u64::from(part.root) << 32,
            all_states,
            self.abort.address(),
        ]);
        arguments.push(u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX));
        arguments.resize(ARGUMENTS, 0);
        let arguments: [u64; ARGUMENTS] = arguments.try_into().unwrap_or([0; ARGUMENTS]);
        let vectors = |elements: usize| (elements * part.dtype.size()).div_ceil(VECTOR);
        let resident = self.resident[entry as usize];
        let shape = match (entry.has_norm(), norm) {
            (true, Some(norm)) => {
                let columns = norm.columns as usize;
                row_shape(part.count / columns, vectors(columns), self.multiprocessors)
            }
            _ => shape(vectors(part.count), resident * self.multiprocessors),
        };
        let launch = Launch {
            overlap: self.device.info().capability >= HOPPER,
            cluster: shape.cluster,
            ..Launch::new(shape.blocks, shape.threads)
        };
        let kind = PEER_TYPES.iter().position(|dtype| *dtype == part.dtype).unwrap_or_default();
        let norm = norm.unwrap_or_default();
        let all: [&dyn Argument; 2] = [&arguments, &norm];
        let all = if entry.has_norm() { &all[..] } else { &all[..1] };
        // SAFETY: the structs that the kernels declare; the buffers by the caller's promise, the slots and counters live as long
        // as this.
        unsafe { self.loaded[kind][entry as usize].launch(stream, launch, all) }
    }
}

/// Eight-byte words of `struct Call` for eight ranks.
const ARGUMENTS: usize = 18;

/// A part of a call's buffers.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) input: Address,
    pub(super) output: Address,
    /// Number of elements: of the array, or of one rank's chunk.
    pub(super) count: usize,
    /// Number of elements from one chunk to the next.
    pub(super) pitch: usize,
    pub(super) dtype: DType,
    /// The root of a broadcast.
    pub(super) root: u32,
}

/// `struct Norm` of the kernels.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Norm {
    pub(super) residual: Address,
    pub(super) weight: Address,
    pub(super) columns: u32,
    pub(super) epsilon: f32,
    /// The type of the residual and of the output, as a number.
    pub(super) narrow: u64,
}

impl Norm {
    /// From an element on, the first of a row.
    fn of(add_norm: &AddNorm<'_>, start: usize) -> Self {
        let weight = add_norm.weight.device();
        let at = (start * add_norm.residual.dtype().size()) as u64;
        Self {
            residual: add_norm.residual.device().map_or(0, |view| view.address + at),
            weight: weight.map_or(0, |view| view.address),
            columns: add_norm.weight.count() as u32,
            epsilon: add_norm.epsilon,
            narrow: add_norm.residual.dtype() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::gpu::{ADD_NORM_MOST, shared_bytes};

    #[test]
    fn slots_hold_every_call_that_takes_them() {
        for ranks in 2..=8 {
            let slots = Slots::new(ranks);
            assert!(slots.array.is_multiple_of(VECTOR));
            // Vectors are distributed in units of 32.
            assert!(slots.chunk >= (TWO_SHOT_PART / VECTOR).div_ceil(32 * ranks) * 32 * VECTOR, "{ranks}");
            // Rows of any length: those that one rank owns.
            assert!(ADD_NORM_MOST <= slots.most(Entry::TwoShotAddNorm));
            for width in 1..=MOST_ROW / VECTOR {
                let rows = ADD_NORM_MOST / (width * VECTOR);
                assert!(rows.div_ceil(ranks) * width * VECTOR <= slots.chunk, "{ranks}, {width}");
            }
            assert_eq!(slots.bytes(), shared_bytes(ranks), "what is planned");
        }
    }
}
