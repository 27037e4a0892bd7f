//! Measures the bandwidth of a link between two GPUs.

use super::context::driver_call;
use super::error::DeviceError;
use super::event::Event;
use super::gpu::Device;
use super::memory::DeviceBuffer;
use super::shared::enable_peer_access;
use super::symbols::foreign;
use crate::types::dtype::DType;

/// Bytes of one copy: enough to make its start-up negligible.
const BYTES: usize = 256 << 20;
const COPIES: usize = 5;

/// Measures a copy from the memory of one GPU to that of another, both of this process, in 10⁹ bytes per second: the best of a few.
/// Returns `None` if they cannot reach each other's memory, so that a copy would go through the host.
///
/// # Errors
/// Those of the driver and of memory (256 MiB on each).
pub fn peer_copy_gbs(from: &Device, to: &Device) -> Result<Option<f64>, DeviceError> {
    let context = &from.context;
    let mut reaches = 0;
    let (a, b) = (context.device(), to.context.device());
    // SAFETY: both devices are ones that the driver gave; the pointer is to a live integer.
    unsafe { driver_call!(context, cuDeviceCanAccessPeer(&raw mut reaches, a, b)) }?;
    if reaches == 0 {
        return Ok(None);
    }
    let source = DeviceBuffer::new(from, DType::U8, BYTES)?;
    let target = DeviceBuffer::new(to, DType::U8, BYTES)?;
    enable_peer_access(from, &target)?;
    let stream = from.stream();
    let marks = (0..=COPIES).map(|_| Event::new(stream, true)).collect::<Result<Vec<_>, _>>()?;
    let copy = || {
        // SAFETY: both buffers have that many bytes and live until the stream has been waited for, and nothing else uses them.
        unsafe { stream.copy(target.address(), source.address(), BYTES) }
    };
    let copied = copy().and_then(|()| {
        for (index, mark) in marks.iter().enumerate() {
            if index > 0 {
                copy()?;
            }
            mark.record(stream)?;
        }
        Ok(())
    });
    // This also applies when a copy has failed: the copies before it use the buffers.
    stream.drain()?;
    copied?;
    let mut best = f64::INFINITY;
    for pair in marks.windows(2) {
        best = best.min(pair[1].since(&pair[0])?.as_secs_f64());
    }
    Ok(Some(BYTES as f64 / best / 1e9))
}
