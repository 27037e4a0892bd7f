//! Calls on a stream of their own.

use std::sync::Arc;
use std::time::Instant;

use super::watchdog::Watchdog;
use crate::device::{Event, Stream};
use crate::error::Result;
use crate::types::operation::CallFingerprint;

/// A call that has been started on a stream of its own.
pub(crate) trait StreamWork: Send {
    /// Waits until it is done, at most until the call's deadline.
    ///
    /// # Errors
    /// Those of the call.
    fn wait(&mut self) -> Result<()>;

    /// Returns an error if the call has failed so far.
    ///
    /// # Errors
    /// Those of the call.
    fn check(&self) -> Result<()>;

    /// Makes the compute stream wait for its end, in any outcome; returns at once.
    ///
    /// # Errors
    /// Those of the GPU.
    fn join(&mut self) -> Result<()>;
}

/// An asynchronous call in progress.
pub(super) struct SideCall {
    pub(super) watchdog: Arc<Watchdog>,
    pub(super) done: Event,
    pub(super) compute: Stream,
    pub(super) fingerprint: CallFingerprint,
    pub(super) sequence: u64,
    pub(super) deadline: Instant,
}

impl StreamWork for SideCall {
    fn wait(&mut self) -> Result<()> {
        let Self { watchdog, done, fingerprint, sequence, .. } = self;
        let group = &watchdog.status().members.group;
        let what = || format!("call {sequence} of group `{group}`, {fingerprint},");
        watchdog.wait(what, fingerprint.operation.peer(), self.deadline, || Ok(done.is_done()?))
    }

    fn check(&self) -> Result<()> {
        self.watchdog.check()
    }

    fn join(&mut self) -> Result<()> {
        Ok(self.compute.wait_event(&self.done)?)
    }
}
