//! Streams: the work of a GPU, and its order.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaStream, sys};

use super::captured::{Own, current};
use super::context::{Context, driver_call};
use super::driver::NOT_READY;
use super::error::DeviceError;
use super::symbols::Address;
use super::symbols::foreign;

/// A queue of work on a GPU. Clones refer to the same stream.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

struct Inner {
    context: Arc<Context>,
    stream: Arc<CudaStream>,
}

impl Stream {
    /// Creates a stream that does not wait for the legacy default stream, of the lowest priority.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let stream = context.took("cuStreamCreate", context.cuda().new_stream())?;
        Ok(Self::over(context, stream))
    }

    /// Wraps an existing stream of this context.
    pub(super) fn over(context: &Arc<Context>, stream: Arc<CudaStream>) -> Self {
        Self { inner: Arc::new(Inner { context: Arc::clone(context), stream }) }
    }

    /// Returns the stream as an object of cudarc, on which an engine allocates slices and launches kernels and libraries.
    pub fn cudarc(&self) -> &Arc<CudaStream> {
        &self.inner.stream
    }

    /// Returns CUDA's handle, on which other libraries can enqueue. It is valid on this thread until a [`capture`](Self::capture)
    /// begins or ends: while this thread captures the stream, it is the handle of the capture.
    pub fn handle(&self) -> sys::CUstream {
        current(self.own())
    }

    /// Returns the stream itself, captured or not.
    pub(super) fn own(&self) -> Own {
        Own { context: self.inner.context.handle(), stream: self.inner.stream.cu_stream() }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.inner.context
    }

    /// Returns true if everything enqueued so far is done. A stream in a capture cannot be queried.
    ///
    /// # Errors
    /// Errors of earlier work on the GPU.
    pub fn is_idle(&self) -> Result<bool, DeviceError> {
        let context = &self.inner.context;
        context.bind()?;
        // SAFETY: the stream lives as long as `self`.
        match unsafe { foreign!(driver, context.driver.cuStreamQuery(self.handle())) } {
            0 => Ok(true),
            NOT_READY => Ok(false),
            code => Err(context.driver.error(context.ordinal, "cuStreamQuery", code)),
        }
    }

    /// Returns true if it is being captured into a graph.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn is_capturing(&self) -> Result<bool, DeviceError> {
        let context = &self.inner.context;
        let mut status = 0u32;
        // SAFETY: the stream lives, the pointer is to a live integer as wide as the enumeration.
        let code = unsafe {
            foreign!(driver, context.driver.cuStreamIsCapturing(self.handle(), (&raw mut status).cast()))
        };
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
        // SAFETY: by the caller's promise.
        unsafe { driver_call!(self.inner.context, cuMemcpyDtoDAsync_v2(to, from, bytes, self.handle())) }
    }

    /// Enqueues a copy from the host.
    ///
    /// # Safety
    /// As [`Stream::copy`]; `from` must stay as it is until the copy is done if it is pinned.
    pub unsafe fn copy_from_host(&self, to: Address, from: &[u8]) -> Result<(), DeviceError> {
        if from.is_empty() {
            return Ok(());
        }
        let (pointer, bytes) = (from.as_ptr().cast::<c_void>(), from.len());
        // SAFETY: by the caller's promise; the length is that of the slice.
        unsafe { driver_call!(self.inner.context, cuMemcpyHtoDAsync_v2(to, pointer, bytes, self.handle())) }
    }

    /// Enqueues a copy to the host.
    ///
    /// # Safety
    /// As [`Stream::copy`]; `to` must not be looked at or freed until the copy is done.
    pub unsafe fn copy_to_host(&self, to: &mut [u8], from: Address) -> Result<(), DeviceError> {
        if to.is_empty() {
            return Ok(());
        }
        let (pointer, bytes) = (to.as_mut_ptr().cast::<c_void>(), to.len());
        // SAFETY: by the caller's promise; the length is that of the slice.
        unsafe { driver_call!(self.inner.context, cuMemcpyDtoHAsync_v2(pointer, from, bytes, self.handle())) }
    }

    /// Enqueues filling `bytes` bytes with `value`.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    pub unsafe fn fill(&self, at: Address, value: u8, bytes: usize) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: by the caller's promise.
        unsafe { driver_call!(self.inner.context, cuMemsetD8Async(at, value, bytes, self.handle())) }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:p} on GPU {})", self.handle(), self.inner.context.ordinal)
    }
}
