//! Points in a stream.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, sys};

use super::context::{Context, driver_call};
use super::driver::NOT_READY;
use super::error::DeviceError;
use super::stream::Stream;
use super::symbols::foreign;

/// Interval at which a wait without a deadline reports that it waits.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// Time for which a wait polls without pause before it begins to sleep in between.
const SPIN: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);

/// A point in a stream that others can wait for and that can be timed.
pub struct Event {
    context: Arc<Context>,
    event: CudaEvent,
}

impl Event {
    /// Creates an event. If `timed`, it can be timed, which costs a little more.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(stream: &Stream, timed: bool) -> Result<Self, DeviceError> {
        use sys::CUevent_flags::{CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING};
        let context = Arc::clone(stream.context());
        let flags = if timed { CU_EVENT_DEFAULT } else { CU_EVENT_DISABLE_TIMING };
        let event = context.took("cuEventCreate", context.cuda().new_event(Some(flags)))?;
        Ok(Self { context, event })
    }

    fn handle(&self) -> sys::CUevent {
        self.event.cu_event()
    }

    /// Sets it to the current end of the stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: event and stream live.
        unsafe { driver_call!(self.context, cuEventRecord(self.handle(), stream.handle())) }
    }

    /// In a capture: makes it a node of the graph, so that each launch sets it and it can be read outside the graph.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn record_external(&self, stream: &Stream) -> Result<(), DeviceError> {
        const EXTERNAL: u32 = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: event and stream live, and flags are the driver's.
        unsafe {
            driver_call!(self.context, cuEventRecordWithFlags(self.handle(), stream.handle(), EXTERNAL))
        }
    }

    /// Returns true if the GPU has passed it. An event that was never recorded counts as passed.
    ///
    /// # Errors
    /// Errors of earlier work on the GPU.
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        self.context.bind()?;
        // SAFETY: the event lives.
        match unsafe { foreign!(driver, self.context.driver.cuEventQuery(self.handle())) } {
            0 => Ok(true),
            NOT_READY => Ok(false),
            code => Err(self.context.driver.error(self.context.ordinal, "cuEventQuery", code)),
        }
    }

    /// Waits until the GPU has passed it, or until the deadline. Returns true if the GPU has passed it.
    ///
    /// # Errors
    /// Errors of earlier work on the GPU.
    pub fn wait_until(&self, deadline: Instant) -> Result<bool, DeviceError> {
        let started = Instant::now();
        loop {
            if self.is_done()? {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(false);
            }
            if now - started < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(NAP.min(deadline - now));
            }
        }
    }

    /// Returns the time from `earlier` to this event, both timed and done. The resolution is half a microsecond.
    ///
    /// # Errors
    /// When one is not timed, not recorded or not done.
    pub fn since(&self, earlier: &Self) -> Result<Duration, DeviceError> {
        let mut milliseconds = 0.0f32;
        // SAFETY: both events live, the pointer is to a live number.
        unsafe {
            driver_call!(
                self.context,
                cuEventElapsedTime(&raw mut milliseconds, earlier.handle(), self.handle())
            )
        }?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Stream {
    /// Returns the current end of the stream.
    fn end(&self) -> Result<Event, DeviceError> {
        let end = Event::new(self, false)?;
        end.record(self)?;
        Ok(end)
    }

    /// Waits until everything enqueued so far is done, without a limit: for copies from and to borrowed memory, which must not be
    /// returned before. The earlier work in the stream has deadlines of its own: the group ends a collective that lacks a rank.
    pub(crate) fn drain(&self) -> Result<(), DeviceError> {
        let started = Instant::now();
        let end = self.end()?;
        while !end.wait_until(Instant::now() + TOLD_EVERY)? {
            tracing::warn!(
                gpu = self.context().ordinal,
                waited = ?started.elapsed(),
                "a copy waits for what is before it in the GPU's stream"
            );
        }
        Ok(())
    }

    /// Makes work that is enqueued from now on wait for the event.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn wait_event(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: stream and event live; flags must be zero.
        unsafe { driver_call!(self.context(), cuStreamWaitEvent(self.handle(), event.handle(), 0)) }
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({:p})", self.handle())
    }
}
