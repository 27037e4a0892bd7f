//! Operations in flight.

use std::sync::mpsc;

use crate::backend::stream::StreamWork;
use crate::error::{Error, Result};

/// An operation that runs beside its caller, in the order it was started. Owns its buffer until it is done.
///
/// On host memory the group's own worker runs it, on a GPU the group's own stream. Dropping it does not cancel the
/// operation; the buffer is then freed when it ends.
#[derive(Debug)]
#[must_use = "an operation that nobody waits for fails unseen"]
pub struct Work<B> {
    inner: Inner<B>,
}

enum Inner<B> {
    Worker(mpsc::Receiver<(B, Result<()>)>),
    Stream(InFlight<B>),
}

/// A buffer that a GPU's stream beside the compute stream works on.
struct InFlight<B> {
    buffer: Option<B>,
    work: Box<dyn StreamWork>,
}

impl<B> InFlight<B> {
    /// The buffer, once the compute stream comes after the operation: whoever gets its memory next uses it there.
    fn join(mut self) -> Result<B> {
        self.work.join()?;
        self.buffer.take().ok_or_else(|| Error::invalid("the operation's buffer has been given back already"))
    }
}

impl<B> Drop for InFlight<B> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if let Err(error) = self.work.join() {
            // The GPU may still write to it, and nothing can be put behind that any more: it is nobody's from now on.
            tracing::debug!(%error, "the buffer of an operation in flight is left to the GPU");
            std::mem::forget(buffer);
        }
    }
}

impl<B> std::fmt::Debug for Inner<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Worker(_) => "on the worker",
            Self::Stream(..) => "on a stream",
        })
    }
}

impl<B> Work<B> {
    pub(crate) fn new() -> (mpsc::SyncSender<(B, Result<()>)>, Self) {
        let (sender, done) = mpsc::sync_channel(1);
        (sender, Self { inner: Inner::Worker(done) })
    }

    pub(crate) fn on_stream(buffer: B, work: Box<dyn StreamWork>) -> Self {
        Self { inner: Inner::Stream(InFlight { buffer: Some(buffer), work }) }
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

    /// Gives the buffer back for use on the GPU's compute stream, which is made to wait for the operation; returns at
    /// once. On host memory it is [`wait`](Self::wait). This is the one that a graph can capture.
    ///
    /// # Errors
    /// The operation's own error so far.
    pub fn join(self) -> Result<B> {
        match self.inner {
            Inner::Worker(_) => self.wait(),
            Inner::Stream(call) => {
                call.work.check()?;
                call.join()
            }
        }
    }

    /// Waits for the end and gives the buffer and the outcome.
    ///
    /// # Errors
    /// When the group's worker has died, or the GPU, and the buffer with it.
    pub fn into_parts(self) -> Result<(B, Result<()>)> {
        match self.inner {
            Inner::Worker(done) => {
                done.recv().map_err(|_| Error::Transport("the worker of this group has died".into()))
            }
            Inner::Stream(mut call) => {
                let outcome = call.work.wait();
                Ok((call.join()?, outcome))
            }
        }
    }
}
