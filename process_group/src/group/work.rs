//! Operations in flight.

use std::sync::mpsc::{self, Receiver, Sender};

use crate::error::{Error, Result};
use crate::stream::StreamWork;

/// An operation that runs in the background, in the order of the starts. Owns its buffer until it is done.
///
/// On host memory the group's own worker executes it, on a GPU the group's own stream. Dropping it does not cancel the operation;
/// the buffer is then freed when the operation ends.
///
/// [`wait`](Self::wait) blocks the thread; in async code, call it where blocking is allowed, as in tokio's `spawn_blocking`.
#[derive(Debug)]
#[must_use = "an operation that nobody waits for fails unseen"]
pub struct Work<B> {
    inner: Inner<B>,
}

enum Inner<B> {
    Worker(Receiver<(B, Result<()>)>),
    Stream(InFlight<B>),
}

/// A buffer that a GPU stream other than the compute stream works on.
struct InFlight<B> {
    buffer: Option<B>,
    work: Box<dyn StreamWork>,
}

impl<B> InFlight<B> {
    /// Orders the compute stream after the operation and returns the buffer: the next user of its memory uses it on that stream.
    fn join(mut self) -> Result<B> {
        self.work.join()?;
        self.buffer.take().ok_or_else(|| Error::invalid("the operation's buffer has been given back already"))
    }
}

impl<B> Drop for InFlight<B> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if let Err(error) = self.work.join() {
            // The GPU may still write to it, and no work can be ordered after that any more: the buffer is leaked.
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
    pub(crate) fn new() -> (Sender<(B, Result<()>)>, Self) {
        let (sender, done) = mpsc::channel();
        (sender, Self { inner: Inner::Worker(done) })
    }

    pub(crate) fn on_stream(buffer: B, work: Box<dyn StreamWork>) -> Self {
        Self { inner: Inner::Stream(InFlight { buffer: Some(buffer), work }) }
    }

    /// Waits for the end and returns the buffer. Ends at the group's timeout at the latest.
    ///
    /// # Errors
    /// The operation's own error; the buffer, whose content is then undefined, is dropped.
    /// [`into_parts`](Self::into_parts) keeps it.
    pub fn wait(self) -> Result<B> {
        let (buffer, result) = self.into_parts()?;
        result.map(|()| buffer)
    }

    /// Returns the buffer for use on the GPU's compute stream, which is ordered after the operation; returns at once. On host
    /// memory it is [`wait`](Self::wait). A graph can capture this method.
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

    /// Waits for the end and returns the buffer and the outcome.
    ///
    /// # Errors
    /// When the group's worker has died, or the GPU, and the buffer with it.
    pub fn into_parts(self) -> Result<(B, Result<()>)> {
        match self.inner {
            Inner::Worker(done) => done
                .recv()
                .map_err(|_| Error::Transport("the thread that ran this operation has died".into())),
            Inner::Stream(mut call) => {
                let outcome = call.work.wait();
                Ok((call.join()?, outcome))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::ProcessGroup;
    use crate::testing::in_time;
    use crate::types::operation::ReduceOp;

    /// A call on a GPU with these outcomes.
    struct OnGpu {
        wait: Result<()>,
        join: Result<()>,
    }

    impl StreamWork for OnGpu {
        fn wait(&mut self) -> Result<()> {
            self.wait.clone()
        }

        fn check(&self) -> Result<()> {
            Ok(())
        }

        fn join(&mut self) -> Result<()> {
            self.join.clone()
        }
    }

    #[test]
    fn an_operation_on_a_stream_returns_its_buffer_or_its_error() {
        let waited = |wait, join| Work::on_stream(vec![5u8], Box::new(OnGpu { wait, join })).wait();
        let broke = || Err(Error::Transport("a link broke".into()));
        assert_eq!(waited(Ok(()), Ok(())).unwrap(), [5]);
        for outcome in [waited(broke(), Ok(())), waited(Ok(()), broke()), waited(broke(), broke())] {
            assert!(outcome.unwrap_err().to_string().contains("a link broke"));
        }
    }

    #[test]
    fn an_operation_whose_worker_has_died_is_an_error() {
        let (worker, work) = Work::<Vec<u8>>::new();
        drop(worker);
        assert!(work.wait().unwrap_err().to_string().contains("has died"));
    }

    #[test]
    fn an_operation_that_nobody_waits_for_leaves_the_group_usable() {
        in_time(|| {
            std::thread::scope(|scope| {
                for mut group in ProcessGroup::loopback(2) {
                    scope.spawn(move || {
                        drop(group.all_reduce_async(vec![1i32; 10], ReduceOp::Sum).unwrap());
                        let work = group.all_reduce_async(vec![2i32; 10], ReduceOp::Sum).unwrap();
                        assert_eq!(work.wait().unwrap(), [4; 10]);
                    });
                }
            });
        });
    }
}
