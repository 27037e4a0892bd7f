//! The work of a view of a slice of cudarc before a call uses it.
//!
//! A slice keeps events for its reads and writes on any stream, and returns its address only to code that orders a stream with
//! them. So its view contains the slice itself, and the group asks for the address when it knows the stream of the call.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, SyncOnDrop};

use super::error::DeviceError;
use super::stream::Stream;

/// A slice to read.
pub(crate) trait Tracked: fmt::Debug + Send + Sync {
    /// Returns the stream on which it was allocated.
    fn home(&self) -> &Arc<CudaStream>;

    /// Returns its length.
    fn bytes(&self) -> usize;

    /// Makes `stream` wait for the work that writes the slice. Work enqueued there until the second value is dropped reads it.
    fn read_on<'s>(&'s self, stream: &'s CudaStream) -> (CUdeviceptr, SyncOnDrop<'s>);
}

/// A slice to write.
pub(crate) trait TrackedMut: Tracked {
    /// Makes `stream` wait for the work that reads or writes the slice. Work enqueued there until the second value is dropped
    /// writes it.
    fn write_on<'s>(&'s mut self, stream: &'s CudaStream) -> (CUdeviceptr, SyncOnDrop<'s>);
}

/// Rejects a slice that no call on this stream can use.
pub(crate) fn check(slice: &dyn Tracked, compute: &Stream) -> Result<(), DeviceError> {
    let context = slice.home().context();
    // Two objects of one context do not know each other's streams.
    if !Arc::ptr_eq(context, compute.cudarc().context()) {
        return Err(DeviceError::invalid(
            "a slice is of another CudaContext than the group's device: make the device by Device::from_cudarc with the \
             slice's context, or allocate the slice on a stream of Device::cudarc",
        ));
    }
    compute.context().bind()?;
    // Only then does cudarc enqueue work for it.
    if context.is_managing_stream_synchronization() && compute.is_capturing()? {
        return Err(DeviceError::invalid(
            "a slice whose uses cudarc tracks by events cannot be used in a capture, as what was recorded before is no \
             part of the graph; call CudaContext::disable_event_tracking and keep to one stream",
        ));
    }
    Ok(())
}

/// Returns the error of work that cudarc could not enqueue to order slices, which cudarc keeps in the context.
pub(crate) fn outcome(stream: &Stream) -> Result<(), DeviceError> {
    let context = stream.cudarc().context();
    if !context.is_managing_stream_synchronization() {
        return Ok(());
    }
    stream.context().took("cuStreamWaitEvent", context.check_err())
}
