//! Copies between pageable host memory and GPU memory through two pinned buffers, so that one is filled while the other is
//! transferred.

#![expect(unsafe_code, reason = "copies to and from GPU memory; each block says why it holds")]

use std::ops::Range;
use std::time::{Duration, Instant};

use ryzanstein_process_group::device::{Device, DeviceError, Event, PinnedBuffer};

use crate::error::Result;
use crate::threads::Threads;

/// Size of a pinned buffer: large enough that the cost of starting a copy is negligible, and small, because the time to pin grows with
/// the size.
const BYTES: usize = 8 << 20;
/// The minimum size of pieces that several threads fill.
const PARALLEL_FROM: usize = 1 << 20;
/// Size of the part that a thread copies at a time: small compared with its total, so that no thread waits long for a delayed
/// one.
const SHARE: usize = 256 << 10;
/// The maximum number of threads that fill buffers: from the page cache, more threads are not faster. With more threads than
/// CPUs, all wait for those that are not scheduled.
const MOST_THREADS: usize = 8;
/// Time limit of a copy, which no copy on a working bus exceeds.
const COPIED_WITHIN: Duration = Duration::from_secs(600);
/// Time for which a wait spins: longer than a pass of a large model, because sleeping would add more to the latency of a token.
const SPIN: Duration = Duration::from_millis(50);
/// Time limit of other waits, which none exceeds unless another rank is lost; the deadline of the group is shorter.
const IDLE_WITHIN: Duration = Duration::from_secs(3600);

/// Two pinned buffers, allocated at first use.
#[derive(Debug)]
pub(super) struct Staging {
    threads: Threads,
    buffers: Vec<(PinnedBuffer, Event)>,
    next: usize,
}

impl Staging {
    /// Creates buffers that are filled by up to `threads` threads.
    pub(super) fn new(threads: usize) -> Self {
        Self { threads: Threads::new(threads.min(MOST_THREADS), "copy"), buffers: Vec::new(), next: 0 }
    }

    /// Returns the index of the buffer whose copy was enqueued first, once that copy is complete.
    fn take(&mut self, device: &Device, bytes: usize) -> Result<usize> {
        self.next = (self.next + 1) % 2;
        let missing = self.buffers.len() <= self.next;
        if missing || self.buffers[self.next].0.bytes().len() < bytes {
            if !missing {
                wait(&self.buffers[self.next].1, device)?;
            }
            let fresh = (PinnedBuffer::new(device, bytes.max(BYTES))?, Event::new(device.stream(), false)?);
            if missing {
                self.next = self.buffers.len();
                self.buffers.push(fresh);
            } else {
                self.buffers[self.next] = fresh;
            }
        }
        wait(&self.buffers[self.next].1, device)?;
        Ok(self.next)
    }

    /// Enqueues the copy of `rows` rows of `width` bytes, which `fill` provides several at a time: it receives the indices of the
    /// rows and their place in pinned memory. Returns when the last piece is enqueued.
    ///
    /// # Safety
    /// All rows fit the memory at `to`, which is used otherwise only in the order of the device's stream.
    pub(super) unsafe fn upload(
        &mut self,
        device: &Device,
        to: u64,
        rows: usize,
        width: usize,
        fill: &(dyn Fn(Range<usize>, &mut [u8]) + Sync),
    ) -> Result<()> {
        if width == 0 {
            return Ok(());
        }
        let piece = (BYTES / width).max(1);
        for start in (0..rows).step_by(piece) {
            let end = rows.min(start + piece);
            let place = self.take(device, (end - start) * width)?;
            let (buffer, event) = &mut self.buffers[place];
            let bytes = &mut buffer.bytes_mut()[..(end - start) * width];
            let share = (SHARE / width).max(1);
            let shares = bytes.chunks_mut(share * width).enumerate();
            self.threads.for_each((end - start) * width >= PARALLEL_FROM, shares, |(i, bytes)| {
                let first = start + i * share;
                fill(first..first + bytes.len() / width, bytes);
            });
            // SAFETY: the target is the caller's promise. The pinned buffer is not changed until its event is complete, which
            // `take` waits for; the driver waits for it too before the buffer is freed.
            unsafe { device.stream().copy_from_host(to + (start * width) as u64, bytes) }?;
            event.record(device.stream())?;
        }
        Ok(())
    }

    /// Copies to pageable host memory, after all enqueued work is complete.
    ///
    /// # Safety
    /// `from` has at least as many bytes, and is written only in the order of the device's stream.
    pub(super) unsafe fn download(&mut self, device: &Device, to: &mut [u8], from: u64) -> Result<()> {
        let mut at = from;
        for piece in to.chunks_mut(BYTES) {
            let place = self.take(device, piece.len())?;
            let (buffer, event) = &mut self.buffers[place];
            let bytes = &mut buffer.bytes_mut()[..piece.len()];
            // SAFETY: the source is the caller's promise; the pinned buffer is read after the wait below.
            unsafe { device.stream().copy_to_host(bytes, at) }?;
            event.record(device.stream())?;
            wait_spinning(event, device)?;
            piece.copy_from_slice(&buffer.bytes()[..piece.len()]);
            at += piece.len() as u64;
        }
        Ok(())
    }
}

fn wait(event: &Event, device: &Device) -> Result<()> {
    if event.wait_until(Instant::now() + COPIED_WITHIN)? {
        return Ok(());
    }
    Err(DeviceError::Invalid(format!(
        "a copy to or from GPU {} has not ended in {COPIED_WITHIN:?}; see `nvidia-smi -q` and the kernel log for faults",
        device.ordinal()
    ))
    .into())
}

/// Waits until the GPU has passed the event.
fn wait_spinning(event: &Event, device: &Device) -> Result<()> {
    let started = Instant::now();
    while started.elapsed() < SPIN {
        if event.is_done()? {
            return Ok(());
        }
        std::hint::spin_loop();
    }
    if event.wait_until(started + IDLE_WITHIN)? {
        return Ok(());
    }
    Err(DeviceError::Invalid(format!(
        "GPU {} has not finished in {IDLE_WITHIN:?} what was given to it; a kernel or a collective hangs",
        device.ordinal()
    ))
    .into())
}
