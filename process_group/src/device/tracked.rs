//! What a view of a slice of cudarc must do before a call uses it.
//!
//! A slice keeps events of what reads and writes it on any stream, and tells its address only to who orders a stream with
//! them. So its view holds the slice itself, and the group asks for the address when it knows the stream of the call.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, SyncOnDrop};

use super::error::DeviceError;
use super::stream::Stream;

/// A slice to read.
pub(crate) trait Tracked: fmt::Debug + Send + Sync {
    /// The stream it was allocated on.
    fn home(&self) -> &Arc<CudaStream>;

    /// Its length.
    fn bytes(&self) -> usize;

    /// Makes `stream` wait for what writes the slice. What is enqueued there until the second value is dropped reads it.
    fn read_on<'s>(&'s self, stream: &'s CudaStream) -> (CUdeviceptr, SyncOnDrop<'s>);
}

/// A slice to write.
pub(crate) trait TrackedMut: Tracked {
    /// Makes `stream` wait for what reads or writes the slice. What is enqueued there until the second value is dropped
    /// writes it.
    fn write_on<'s>(&'s mut self, stream: &'s CudaStream) -> (CUdeviceptr, SyncOnDrop<'s>);
}

/// Refuses a slice that no call on this stream can use.
pub(crate) fn check(slice: &dyn Tracked, compute: &Stream) -> Result<(), DeviceError> {
    let context = slice.home().context();
    // Two objects of one context know nothing of each other's streams.
    if !Arc::ptr_eq(context, compute.cudarc().context()) {
        return Err(DeviceError::invalid(
            "a slice is of another CudaContext than the group's device: make the device by Device::from_cudarc with the \
             slice's context, or allocate the slice on a stream of Device::cudarc",
        ));
    }
    compute.context().bind()?;
    // Only then does cudarc enqueue anything for it.
    if context.is_managing_stream_synchronization() && compute.is_capturing()? {
        return Err(DeviceError::invalid(
            "a slice whose uses cudarc tracks by events cannot be used in a capture, as what was recorded before is no \
             part of the graph; call CudaContext::disable_event_tracking and keep to one stream",
        ));
    }
    Ok(())
}

/// What cudarc could not enqueue to order slices, which it keeps in the context.
pub(crate) fn outcome(stream: &Stream) -> Result<(), DeviceError> {
    let context = stream.cudarc().context();
    if !context.is_managing_stream_synchronization() {
        return Ok(());
    }
    stream.context().took("cuStreamWaitEvent", context.check_err())
}
