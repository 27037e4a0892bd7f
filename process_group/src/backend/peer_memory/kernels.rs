//! The kernels, their slots, and how many blocks they have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::shared::SharedMemory;
use crate::buffer::ViewMut;
use crate::call::Call;
use crate::device::{Address, Device, DeviceBuffer, DeviceError, Kernel, Launch, PinnedBuffer, Stream};
use crate::dtype::DType;
use crate::paths::PeerAlgorithm;
use crate::paths::gpu::{PEER_TYPES, one_shot_most};

const SOURCE: &str = include_str!("all_reduce.cu");
/// Bytes of a vector: what a thread pushes at once.
const VECTOR: usize = 16;
/// Most bytes of one launch of the two-shot kernel; longer arrays take several. The gap between two of them is less than a
/// hundredth of the time of one.
const TWO_SHOT_PART: usize = 32 << 20;
/// How much longer than its call a kernel waits. The watchdog gives the group up first; this is for when there is none.
const PATIENCE: Duration = Duration::from_secs(60);
/// Kernels compiled with PDL can start while another ends.
const OVERLAP_FROM: (u32, u32) = (9, 0);

/// Where the slots of a rank are, for a world size: those of the one-shot kernel, then those of the two-shot kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Slots {
    /// Bytes of a slot of the one-shot kernel: a whole array.
    one_shot: usize,
    /// Bytes of a slot of the two-shot kernel: a chunk.
    two_shot: usize,
    ranks: usize,
}

impl Slots {
    pub(super) const fn new(ranks: usize) -> Self {
        let two_shot = TWO_SHOT_PART.div_ceil(ranks).next_multiple_of(VECTOR);
        Self { one_shot: one_shot_most(ranks), two_shot, ranks }
    }

    /// Two phases of one slot for each source.
    const fn one_shot_bytes(self) -> usize {
        2 * self.ranks * self.one_shot
    }

    /// All bytes. The two-shot kernel has slots for what is scattered and for what is gathered.
    pub(super) const fn bytes(self) -> usize {
        self.one_shot_bytes() + 4 * self.ranks * self.two_shot
    }
}

/// The word by which the host ends kernels that wait.
pub(in crate::backend) struct AbortWord {
    memory: PinnedBuffer,
    address: Address,
}

impl AbortWord {
    pub(in crate::backend) fn new(device: &Device) -> Result<Self, DeviceError> {
        let memory = PinnedBuffer::new(device, VECTOR)?;
        let address = memory.device_address()?;
        Ok(Self { memory, address })
    }

    fn word(&self) -> &AtomicU32 {
        let word: *const AtomicU32 = std::ptr::from_ref(&self.memory.bytes()[0]).cast();
        // SAFETY: page-locked memory begins at a page; four bytes that live as long as `self`, and that the GPU and the host use
        // as one atomic word only.
        unsafe { &*word }
    }

    /// Kernels that wait end soon, with wrong results.
    pub(super) fn set(&self) {
        self.word().store(1, Ordering::Release);
    }

    /// Whether a kernel has given up, or was told to.
    pub(super) fn is_set(&self) -> bool {
        self.word().load(Ordering::Acquire) != 0
    }
}

/// The kernels of one rank of a group.
pub(super) struct Kernels {
    device: Device,
    memory: SharedMemory,
    slots: Slots,
    /// By algorithm: how many calls each block has seen.
    calls: [DeviceBuffer; 2],
    blocks: u32,
    abort: Arc<AbortWord>,
    /// By type, in the order of [`PEER_TYPES`], and by algorithm.
    loaded: Vec<[Kernel; 2]>,
}

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
            let module = device.kernels().module("all_reduce.cu", SOURCE, &options)?;
            Ok([module.kernel("one_shot")?, module.kernel("two_shot")?])
        };
        let loaded: Vec<[Kernel; 2]> = PEER_TYPES.iter().map(load).collect::<Result<_, DeviceError>>()?;
        // All blocks of a launch wait for others, so all must be on the GPU at once.
        let mut fit = u32::MAX;
        for kernel in loaded.iter().flatten() {
            fit = fit.min(kernel.blocks_per_multiprocessor(MOST_THREADS, 0)?);
        }
        let blocks = (device.info().multiprocessors * fit.clamp(1, 2) / memory.ranks_here()).max(1);
        let zeros = vec![0u32; blocks as usize];
        let counters = || DeviceBuffer::from_slice(device, &zeros);
        let calls = [counters()?, counters()?];
        let abort = Arc::clone(abort);
        let kernels = Self { device: device.clone(), memory, slots, calls, blocks, abort, loaded };
        // Loading a kernel may wait for the GPU, also for kernels that wait for this rank. So each is loaded now, by a launch for
        // no elements: nobody has pushed anything yet, and all ranks count the same launches.
        for dtype in PEER_TYPES {
            for algorithm in PeerAlgorithm::ALL {
                let nothing = Part { input: 0, output: 0, count: 0, dtype };
                // SAFETY: the kernels read and write no element.
                unsafe { kernels.launch_part(algorithm, nothing, PATIENCE, device.stream()) }?;
            }
        }
        device.stream().drain()?;
        Ok(kernels)
    }

    /// Enqueues an all-reduce.
    ///
    /// # Safety
    /// As [`Communicator::launch`](crate::backend::stream::Communicator::launch). Every rank makes the same calls in the same
    /// order, and this one on one stream at a time.
    pub(super) unsafe fn launch(
        &self,
        algorithm: PeerAlgorithm,
        call: &Call<'_>,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let (dtype, count) = (call.fingerprint.dtype, call.fingerprint.count);
        let output = call.output.as_ref().and_then(ViewMut::device).map_or(0, |view| view.address);
        let input = call.input.and_then(|view| view.device()).map_or(output, |view| view.address);
        let most = match algorithm {
            PeerAlgorithm::OneShot => self.slots.one_shot,
            PeerAlgorithm::TwoShot => TWO_SHOT_PART,
        } / dtype.size();
        let patience = call.deadline.saturating_duration_since(Instant::now()) + PATIENCE;
        // Nothing is launched for nothing: phases change only with calls in which ranks hear of each other.
        for start in (0..count).step_by(most) {
            let at = (start * dtype.size()) as u64;
            let part = Part { input: input + at, output: output + at, count: most.min(count - start), dtype };
            // SAFETY: a part of the buffers, by the caller's promise.
            unsafe { self.launch_part(algorithm, part, patience, stream) }?;
        }
        Ok(())
    }

    /// Enqueues one launch of a kernel.
    ///
    /// # Safety
    /// As [`launch`](Self::launch), for at least one element, and as many as its slots hold.
    pub(super) unsafe fn launch_part(
        &self,
        algorithm: PeerAlgorithm,
        part: Part,
        patience: Duration,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let which = algorithm as usize;
        let base = match algorithm {
            PeerAlgorithm::OneShot => 0,
            PeerAlgorithm::TwoShot => self.slots.one_shot_bytes() as u64,
        };
        let capacity = [self.slots.one_shot, self.slots.two_shot][which] as u64;
        // As `struct Call` of the kernels: every field has eight bytes, but for the number of blocks, which is followed by
        // four that nobody reads.
        let mut arguments = Vec::with_capacity(ARGUMENTS);
        arguments.extend([part.input, part.output, part.count as u64]);
        arguments.extend(self.memory.addresses().iter().map(|address| address + base));
        arguments.extend([capacity, self.calls[which].address(), u64::from(self.blocks), self.abort.address]);
        arguments.push(u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX));
        arguments.resize(ARGUMENTS, 0);
        let arguments: [u64; ARGUMENTS] = arguments.try_into().unwrap_or([0; ARGUMENTS]);
        let vectors = (part.count * part.dtype.size()).div_ceil(VECTOR);
        let (threads, blocks) = shape(algorithm, vectors, self.slots.ranks, self.blocks);
        let launch =
            Launch { overlap: self.device.info().capability >= OVERLAP_FROM, ..Launch::new(blocks, threads) };
        let kind = PEER_TYPES.iter().position(|dtype| *dtype == part.dtype).unwrap_or_default();
        // SAFETY: the struct that the kernels declare; the buffers by the caller's promise, the slots and counters live as long
        // as this.
        unsafe { self.loaded[kind][which].launch(stream, launch, &[&arguments]) }
    }
}

/// Eight-byte words of `struct Call` for eight ranks.
const ARGUMENTS: usize = 16;

/// A part of a call's buffers.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) input: Address,
    pub(super) output: Address,
    pub(super) count: usize,
    pub(super) dtype: DType,
}

/// Most threads of a block.
const MOST_THREADS: u32 = 512;

/// Threads of a block, and blocks: a vector for each thread, as far as they fit the GPU. Measured on H200.
fn shape(algorithm: PeerAlgorithm, vectors: usize, ranks: usize, most: u32) -> (u32, u32) {
    let (vectors, threads) = match algorithm {
        PeerAlgorithm::OneShot => match vectors {
            257..=32_768 => (vectors, 128),
            0..=65_536 => (vectors, 256),
            _ => (vectors, MOST_THREADS),
        },
        PeerAlgorithm::TwoShot => (vectors.div_ceil(ranks), MOST_THREADS),
    };
    let blocks = u32::try_from(vectors.div_ceil(threads as usize)).unwrap_or(most);
    (threads, blocks.clamp(1, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_has_a_thread_for_each_vector_as_far_as_they_fit() {
        assert_eq!(shape(PeerAlgorithm::OneShot, 64, 2, 264), (256, 1));
        assert_eq!(shape(PeerAlgorithm::OneShot, 4096, 2, 264), (128, 32));
        assert_eq!(shape(PeerAlgorithm::OneShot, 1 << 17, 2, 264), (512, 256));
        assert_eq!(shape(PeerAlgorithm::TwoShot, 1 << 20, 2, 264), (512, 264));
        assert_eq!(shape(PeerAlgorithm::TwoShot, 3, 4, 132), (512, 1));
    }

    #[test]
    fn slots_hold_every_call_that_takes_them() {
        for ranks in 2..=8 {
            let slots = Slots::new(ranks);
            assert!(slots.one_shot >= one_shot_most(ranks) && slots.one_shot.is_multiple_of(VECTOR));
            // The kernel cuts vectors, not bytes.
            assert!(slots.two_shot >= (TWO_SHOT_PART / VECTOR).div_ceil(ranks) * VECTOR, "{ranks}");
        }
    }
}
