//! Operations in flight.

use std::sync::mpsc;

use crate::error::{Error, Result};

/// An operation that runs on the group's own worker, in the order it was started. Owns its buffer until it is done.
///
/// Dropping it does not cancel the operation; the buffer is then freed when it ends.
#[derive(Debug)]
#[must_use = "an operation that nobody waits for fails unseen"]
pub struct Work<B> {
    done: mpsc::Receiver<(B, Result<()>)>,
}

impl<B> Work<B> {
    pub(crate) fn new() -> (mpsc::SyncSender<(B, Result<()>)>, Self) {
        let (sender, done) = mpsc::sync_channel(1);
        (sender, Self { done })
    }

    /// Waits for the end and gives the buffer back. Ends at the group's timeout at the latest.
    ///
    /// # Errors
    /// The operation's own error; the buffer, whose content is then undefined, is dropped.
    /// [`into_parts`](Self::into_parts) keeps it.
    pub fn wait(self) -> Result<B> {
        let (buffer, result) = self.into_parts()?;
        result.map(|()| buffer)
    }

    /// Waits for the end and gives the buffer and the outcome.
    ///
    /// # Errors
    /// When the group's worker has died, and the buffer with it.
    pub fn into_parts(self) -> Result<(B, Result<()>)> {
        self.done.recv().map_err(|_| Error::Transport("the worker of this group has died".into()))
    }
}
