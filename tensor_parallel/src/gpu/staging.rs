//! Copies between ordinary memory and the GPU's through pinned buffers, two of them, so that one is filled while the other
//! is on its way.

#![expect(unsafe_code, reason = "copies to and from GPU memory; each block says why it holds")]

use std::ops::Range;
use std::time::{Duration, Instant};

use ryzanstein_process_group::device::{Device, DeviceError, Event, PinnedBuffer};

use crate::error::Result;
use crate::threads::Threads;

/// Bytes of a pinned buffer: enough that starting a copy costs nothing beside it, and few, as pinning takes half a
/// millisecond a megabyte.
const BYTES: usize = 8 << 20;
/// Pieces of this size and more are filled by several threads.
const PARALLEL_FROM: usize = 1 << 20;
/// What a thread takes at a time: small beside its share, so that none waits long for one that was held up.
const SHARE: usize = 256 << 10;
/// From the page cache, so many fill the buffers as quickly as more do. Where there are more than processors, all wait
/// for those that have none.
const MOST_THREADS: usize = 8;
/// No copy takes longer on a bus that works.
const COPIED_WITHIN: Duration = Duration::from_secs(600);
/// How long a wait asks without pause: a pass of a large model takes less, and sleeping costs a token's time more.
const SPIN: Duration = Duration::from_millis(50);
/// Nothing that is waited for here takes longer, unless another rank has gone; the group's own deadline is shorter.
const IDLE_WITHIN: Duration = Duration::from_secs(3600);

/// Two pinned buffers, allocated at first use.
#[derive(Debug)]
pub(super) struct Staging {
    threads: Threads,
    buffers: Vec<(PinnedBuffer, Event)>,
    next: usize,
}

impl Staging {
    /// With up to so many threads to fill the buffers.
    pub(super) fn new(threads: usize) -> Self {
        Self { threads: Threads::new(threads.min(MOST_THREADS), "copy"), buffers: Vec::new(), next: 0 }
    }

    /// Which buffer to use: the one whose copy was enqueued longest ago, when that is done.
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

    /// Enqueues the copy of `rows` rows of `width` bytes, which `fill` provides some at a time: it gets the rows'
    /// numbers and their place in pinned memory. Returns when the last piece is enqueued.
    ///
    /// # Safety
    /// All rows fit the memory at `to`, which nothing else uses but in the order of the device's stream.
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
            // SAFETY: the target is the caller's promise. The pinned buffer stays as it is until its event is done,
            // which `take` waits for; the driver waits for it too before the buffer is freed.
            unsafe { device.stream().copy_from_host(to + (start * width) as u64, bytes) }?;
            event.record(device.stream())?;
        }
        Ok(())
    }

    /// Copies to ordinary memory, when all that was enqueued before is done.
    ///
    /// # Safety
    /// There are as many bytes at `from`, which nothing writes but in the order of the device's stream.
    pub(super) unsafe fn download(&mut self, device: &Device, to: &mut [u8], from: u64) -> Result<()> {
        let mut at = from;
        for piece in to.chunks_mut(BYTES) {
            let place = self.take(device, piece.len())?;
            let (buffer, event) = &mut self.buffers[place];
            let bytes = &mut buffer.bytes_mut()[..piece.len()];
            // SAFETY: the source is the caller's promise; the pinned buffer is looked at after the wait below.
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

/// Waits until the GPU has come past the event.
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
