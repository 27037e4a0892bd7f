//! GPU memory for tensors: long-lived memory is allocated in exact sizes, short-lived memory comes from a pool.
//!
//! All work of one rank is on one stream, so a block may be reused as soon as its last use is enqueued.

#![expect(unsafe_code, reason = "views and copies of GPU memory; each block says why it holds")]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use ryzanstein_process_group::device::{Device, DeviceBuffer, DeviceError, Event, PinnedBuffer};
use ryzanstein_process_group::{DType, DeviceMemory, View, ViewMut};

use super::staging::Staging;
use crate::error::{Error, Result};
use crate::memory;
use crate::storage::{Storage, with_elements};

/// A GPU with the pool of its short-lived tensors.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) device: Device,
    staging: Mutex<Staging>,
    /// The places of earlier [downloads](super::Download).
    pub(super) downloads: Mutex<Vec<(PinnedBuffer, Event)>>,
    pool: Mutex<Pool>,
}

/// Unused blocks, by size.
type Free = HashMap<usize, Vec<DeviceBuffer>>;

#[derive(Debug, Default)]
struct Pool {
    free: Free,
    /// Blocks that a graph under capture has used already, by capturing thread: the graph keeps their addresses, so they must not
    /// be used otherwise.
    captured: HashMap<ThreadId, Free>,
}

impl Pool {
    fn take(&mut self, class: usize) -> Option<DeviceBuffer> {
        let captured = self.captured_here().and_then(|free| free.get_mut(&class)?.pop());
        captured.or_else(|| self.free.get_mut(&class)?.pop())
    }

    fn give(&mut self, class: usize, buffer: DeviceBuffer) {
        let free = match self.captured.get_mut(&thread::current().id()) {
            Some(captured) => captured,
            None => &mut self.free,
        };
        free.entry(class).or_default().push(buffer);
    }

    /// Returns the unused blocks of this thread's capture.
    fn captured_here(&mut self) -> Option<&mut Free> {
        if self.captured.is_empty() { None } else { self.captured.get_mut(&thread::current().id()) }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the size of the block for `bytes`. It is at most an eighth larger, so that few sizes serve many lengths.
pub(crate) fn class(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 16).max(256);
    bytes.next_multiple_of(step)
}

impl Gpu {
    pub(crate) fn new(device: &Device, threads: usize) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            staging: Mutex::new(Staging::new(threads)),
            downloads: Mutex::default(),
            pool: Mutex::default(),
        })
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceBuffer> {
        let allocate = || DeviceBuffer::new(&self.device, DType::U8, bytes);
        match allocate() {
            // The pool may hold the memory that is lacking.
            Err(DeviceError::Budget { .. } | DeviceError::OutOfMemory { .. }) if self.empty() => {
                Ok(allocate()?)
            }
            other => Ok(other?),
        }
    }

    /// Frees the memory of the pool. Returns false while work is captured, which freeing would disturb.
    fn empty(&self) -> bool {
        let mut pool = lock(&self.pool);
        let is_calm = pool.captured.is_empty();
        if is_calm {
            let kept = pool.free.values().flatten().map(DeviceBuffer::bytes).sum::<usize>();
            self.device.pool_gives(kept as u64);
            pool.free.clear();
        }
        is_calm
    }

    /// Allocates long-lived memory of exactly this size, which is freed when it is dropped.
    pub(crate) fn keep(self: &Arc<Self>, bytes: usize) -> Result<Block> {
        Ok(Block { buffer: Some(self.allocate(bytes)?), pooled: None, gpu: Arc::clone(self) })
    }

    /// Allocates memory from the pool, which returns there when it is dropped.
    pub(crate) fn scratch(self: &Arc<Self>, bytes: usize) -> Result<Block> {
        let class = class(bytes.max(1));
        let free = lock(&self.pool).take(class);
        let buffer = match free {
            Some(buffer) => {
                self.device.pool_gives(buffer.bytes() as u64);
                buffer
            }
            None => self.allocate(class)?,
        };
        Ok(Block { buffer: Some(buffer), pooled: Some(class), gpu: Arc::clone(self) })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.empty();
    }
}

/// Blocks that a graph uses. They return to the pool when they are dropped.
#[derive(Debug)]
pub(crate) struct CapturedMemory {
    gpu: Arc<Gpu>,
    free: Free,
}

impl CapturedMemory {
    /// Keeps the blocks that `work`, which this thread captures meanwhile, allocates and drops.
    ///
    /// # Errors
    /// Returns an error if this thread is already capturing.
    pub(crate) fn during<T>(gpu: &Arc<Gpu>, work: impl FnOnce() -> T) -> Result<(Self, T)> {
        match lock(&gpu.pool).captured.entry(thread::current().id()) {
            Entry::Occupied(_) => {
                return Err(Error::input("a recording is already under way on this thread; finish it first"));
            }
            Entry::Vacant(new) => new.insert(Free::new()),
        };
        // Even if `work` panics, later allocations use the pool again.
        let mut captured = Self { gpu: Arc::clone(gpu), free: Free::new() };
        let ends = Ends(&mut captured);
        let done = work();
        drop(ends);
        Ok((captured, done))
    }
}

/// Guard that ends a capture.
struct Ends<'a>(&'a mut CapturedMemory);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        let here = thread::current().id();
        self.0.free = lock(&self.0.gpu.pool).captured.remove(&here).unwrap_or_default();
    }
}

impl Drop for CapturedMemory {
    fn drop(&mut self) {
        let mut pool = lock(&self.gpu.pool);
        for (class, buffers) in self.free.drain() {
            pool.free.entry(class).or_default().extend(buffers);
        }
    }
}

/// A block of GPU memory, aligned to 256 bytes.
#[derive(Debug)]
pub(crate) struct Block {
    buffer: Option<DeviceBuffer>,
    pooled: Option<usize>,
    gpu: Arc<Gpu>,
}

impl Block {
    pub(crate) fn address(&self) -> u64 {
        self.buffer.as_ref().map_or(0, DeviceBuffer::address)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, DeviceBuffer::bytes)
    }

    /// Returns true if the block is used in the order of this GPU's stream.
    pub(crate) fn is_on(&self, gpu: &Gpu) -> bool {
        self.gpu.device.stream().handle() == gpu.device.stream().handle()
    }

    /// Enqueues filling the block with zeros.
    pub(crate) fn clear(&mut self) -> Result<()> {
        // SAFETY: the block's own memory, which is freed or reused only later in the same stream.
        unsafe { self.gpu.device.stream().fill(self.address(), 0, self.bytes()) }?;
        Ok(())
    }

    /// Enqueues a copy from pageable host memory to the start of the block.
    pub(crate) fn write(&mut self, from: &[u8]) -> Result<()> {
        assert!(from.len() <= self.bytes(), "the block holds what is copied");
        // SAFETY: the length was checked; pageable memory is read before the call returns.
        unsafe { self.gpu.device.stream().copy_from_host(self.address(), from) }?;
        Ok(())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let (Some(class), Some(buffer)) = (self.pooled, self.buffer.take()) {
            self.gpu.device.pool_keeps(buffer.bytes() as u64);
            lock(&self.gpu.pool).give(class, buffer);
        }
    }
}

/// Elements in the memory of a GPU.
#[derive(Debug)]
pub(crate) struct DeviceArray {
    block: Block,
    dtype: DType,
    count: usize,
    /// True if no kernel has written it, only copies.
    is_settled: bool,
}

impl DeviceArray {
    pub(crate) fn new(block: Block, dtype: DType, count: usize) -> Self {
        assert!(count * dtype.size() <= block.bytes(), "the block holds the elements");
        Self { block, dtype, count, is_settled: true }
    }

    /// Allocates another array on this GPU, of unspecified content.
    pub(crate) fn like(&self, count: usize) -> Result<Self> {
        Ok(Self::new(self.block.gpu.scratch(count * self.dtype.size())?, self.dtype, count))
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.block.gpu.device.ordinal()
    }

    pub(crate) fn is_on(&self, gpu: &Gpu) -> bool {
        self.block.is_on(gpu)
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.block.gpu
    }

    pub(crate) fn address(&self) -> u64 {
        self.block.address()
    }

    /// Returns the address for a kernel that writes.
    pub(crate) fn address_mut(&mut self) -> u64 {
        self.is_settled = false;
        self.block.address()
    }

    /// Returns true if no kernel has written the array, only copies. A kernel that starts before the previous one has ended may
    /// then read it at once: copies and kernels do not overlap.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_settled
    }

    fn memory(&self, range: &Range<usize>) -> DeviceMemory {
        assert!(range.start <= range.end && range.end <= self.count, "the range is within the array");
        let size = self.dtype.size();
        DeviceMemory {
            ordinal: self.ordinal(),
            address: self.address() + (range.start * size) as u64,
            bytes: range.len() * size,
        }
    }

    pub(crate) fn view(&self, range: Range<usize>) -> View<'_> {
        // SAFETY: within this array. Its block is written, and reused by others, only in the order of the stream, so after calls
        // that were enqueued there; calls on other streams are joined to the stream by `Work` before it returns the array.
        // Freeing waits for the GPU.
        unsafe { View::on_device(self.dtype, self.memory(&range)) }
    }

    pub(crate) fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        self.is_settled = false;
        // SAFETY: as above, and the view borrows the array exclusively.
        unsafe { ViewMut::on_device(self.dtype, self.memory(&range)) }
    }

    /// Enqueues a copy of elements to others of this array, from `to` on. The two must not overlap.
    pub(crate) fn copy_within(&mut self, from: Range<usize>, to: usize) -> Result<()> {
        let end = to + from.len();
        assert!(end <= from.start || from.end <= to, "a copy does not overlap what it copies");
        let (source, target) = (self.memory(&from), self.memory(&(to..end)));
        // SAFETY: both are within this array, which is borrowed exclusively, and do not overlap.
        unsafe { self.block.gpu.device.stream().copy(target.address, source.address, source.bytes) }?;
        Ok(())
    }

    /// Enqueues a copy of elements, `count` in total, to another array.
    pub(crate) fn copied(&self, ranges: impl Iterator<Item = Range<usize>>, count: usize) -> Result<Self> {
        let copy = self.like(count)?;
        let mut at = 0;
        for range in ranges {
            let (source, target) = (self.memory(&range), copy.memory(&(at..at + range.len())));
            // SAFETY: within both arrays, of the same GPU and type; the new one has no other reference.
            unsafe { self.block.gpu.device.stream().copy(target.address, source.address, source.bytes) }?;
            at += range.len();
        }
        Ok(copy)
    }

    /// Writes `rows` rows of `width` bytes from byte `at` on; see [`Tensor::fill_rows`](crate::Tensor).
    pub(crate) fn upload(
        &mut self,
        at: usize,
        rows: usize,
        width: usize,
        fill: &(dyn Fn(Range<usize>, &mut [u8]) + Sync),
    ) -> Result<()> {
        assert!(at + rows * width <= self.count * self.dtype.size(), "the rows are within the array");
        let gpu = &self.block.gpu;
        // SAFETY: checked above to be within this array, which is borrowed exclusively.
        unsafe { lock(&gpu.staging).upload(&gpu.device, self.address() + at as u64, rows, width, fill) }
    }

    /// Waits for the computation of the values, and copies them. They are exact.
    pub(crate) fn download(&self) -> Result<Vec<f32>> {
        let copy = |bytes: &mut [u8]| {
            assert!(bytes.len() == self.count * self.dtype.size(), "there is room for the whole array");
            let gpu = &self.block.gpu;
            // SAFETY: the array has the same number of bytes.
            unsafe { lock(&gpu.staging).download(&gpu.device, bytes, self.address()) }
        };
        if self.dtype == DType::F32 {
            let mut values = memory::zeroed_vector::<f32>(self.count);
            copy(bytemuck::cast_slice_mut(&mut values))?;
            return Ok(values);
        }
        let mut storage = Storage::zeros(self.count, self.dtype)?;
        with_elements!(&mut storage, values => copy(bytemuck::cast_slice_mut(values)))?;
        Ok(storage.widened().into_owned())
    }
}
