//! Streams: what runs on a GPU, and in which order.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::context::Context;
use super::driver::NOT_READY;
use super::error::DeviceError;
use super::poll::poll;
use super::symbols::{Address, Handle};

/// How often a wait without a deadline says that it waits.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// A queue of work on a GPU. Clones are the same stream.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

struct Inner {
    context: Arc<Context>,
    handle: Handle,
    /// It is being captured into a [`Graph`](super::Graph).
    capturing: Mutex<bool>,
}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        context.bind()?;
        let mut handle = 0;
        // Flag 1: it does not wait for the legacy default stream. Priority 0: the lowest, as any stream by default.
        // SAFETY: the pointer is to a live handle, and a context is current.
        let code = unsafe { (context.driver.cuStreamCreateWithPriority)(&raw mut handle, 1, 0) };
        context.check("cuStreamCreate", code)?;
        Ok(Self {
            inner: Arc::new(Inner { context: Arc::clone(context), handle, capturing: Mutex::new(false) }),
        })
    }

    /// CUDA's handle, for libraries beside the driver's.
    pub fn handle(&self) -> Handle {
        self.inner.handle
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.inner.context
    }

    /// Whether it is being captured into a graph by this program's own doing; held while that changes.
    pub(super) fn capturing(&self) -> &Mutex<bool> {
        &self.inner.capturing
    }

    /// Whether everything enqueued so far has been done.
    ///
    /// # Errors
    /// What went wrong on the GPU meanwhile.
    pub fn is_idle(&self) -> Result<bool, DeviceError> {
        let context = &self.inner.context;
        context.bind()?;
        // SAFETY: the stream lives as long as `self`.
        match unsafe { (context.driver.cuStreamQuery)(self.inner.handle) } {
            0 => Ok(true),
            NOT_READY => Ok(false),
            code => Err(context.driver.error(context.ordinal, "cuStreamQuery", code)),
        }
    }

    /// Waits until everything enqueued so far has been done, or the deadline has passed; says which.
    ///
    /// # Errors
    /// What went wrong on the GPU meanwhile.
    pub fn wait_until(&self, deadline: Instant) -> Result<bool, DeviceError> {
        poll(deadline, || self.is_idle())
    }

    /// Waits until everything enqueued so far has been done, however long: for copies from and to borrowed memory, which must
    /// not be given back before. What they wait for in the stream has deadlines of its own: a collective that lacks a rank is
    /// ended by its group.
    pub(crate) fn drain(&self) -> Result<(), DeviceError> {
        let started = Instant::now();
        while !self.wait_until(Instant::now() + TOLD_EVERY)? {
            tracing::warn!(
                gpu = self.inner.context.ordinal,
                waited = ?started.elapsed(),
                "a copy waits for what is before it in the GPU's stream"
            );
        }
        Ok(())
    }

    /// Whether it is being captured into a graph.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn is_capturing(&self) -> Result<bool, DeviceError> {
        let context = &self.inner.context;
        let mut status = 0;
        // SAFETY: the stream lives, the pointer is to a live integer.
        let code = unsafe { (context.driver.cuStreamIsCapturing)(self.inner.handle, &raw mut status) };
        context.check("cuStreamIsCapturing", code)?;
        Ok(status != 0)
    }

    /// Enqueues a copy within the GPU, or between GPUs.
    ///
    /// # Safety
    /// Both ranges are memory of GPUs that nothing else writes (or reads, where it is written) until the copy is done,
    /// and that stays allocated as long.
    pub unsafe fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        let context = &self.inner.context;
        context.bind()?;
        // SAFETY: by the caller's promise.
        let code = unsafe { (context.driver.cuMemcpyDtoDAsync_v2)(to, from, bytes, self.inner.handle) };
        context.check("cuMemcpyDtoDAsync", code)
    }

    /// Enqueues a copy from the host.
    ///
    /// # Safety
    /// As [`Stream::copy`]; `from` must stay as it is until the copy is done if it is pinned.
    pub unsafe fn copy_from_host(&self, to: Address, from: &[u8]) -> Result<(), DeviceError> {
        if from.is_empty() {
            return Ok(());
        }
        let context = &self.inner.context;
        context.bind()?;
        let pointer = from.as_ptr().cast::<c_void>();
        // SAFETY: by the caller's promise; the length is that of the slice.
        let code =
            unsafe { (context.driver.cuMemcpyHtoDAsync_v2)(to, pointer, from.len(), self.inner.handle) };
        context.check("cuMemcpyHtoDAsync", code)
    }

    /// Enqueues a copy to the host.
    ///
    /// # Safety
    /// As [`Stream::copy`]; `to` must not be looked at or freed until the copy is done.
    pub unsafe fn copy_to_host(&self, to: &mut [u8], from: Address) -> Result<(), DeviceError> {
        if to.is_empty() {
            return Ok(());
        }
        let context = &self.inner.context;
        context.bind()?;
        let pointer = to.as_mut_ptr().cast::<c_void>();
        // SAFETY: by the caller's promise; the length is that of the slice.
        let code =
            unsafe { (context.driver.cuMemcpyDtoHAsync_v2)(pointer, from, to.len(), self.inner.handle) };
        context.check("cuMemcpyDtoHAsync", code)
    }

    /// Enqueues filling `bytes` bytes with `value`.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    pub unsafe fn fill(&self, at: Address, value: u8, bytes: usize) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        let context = &self.inner.context;
        context.bind()?;
        // SAFETY: by the caller's promise.
        let code = unsafe { (context.driver.cuMemsetD8Async)(at, value, bytes, self.inner.handle) };
        context.check("cuMemsetD8Async", code)
    }

    /// Lets another thread than the one that uses the stream enqueue something, unless that would end up in a graph.
    pub(crate) fn unless_capturing(
        &self,
        act: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let capturing = self.inner.capturing.lock().unwrap_or_else(PoisonError::into_inner);
        if *capturing { Ok(()) } else { act() }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `Stream::new`, destroyed once. The driver finishes what is in it.
            let _ = unsafe { (self.context.driver.cuStreamDestroy_v2)(self.handle) };
        }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:#x} on GPU {})", self.inner.handle, self.inner.context.ordinal)
    }
}
