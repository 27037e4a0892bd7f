//! Operations in flight.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use futures_channel::oneshot;

use crate::error::{Error, Result};
use crate::stream::StreamWork;

/// An operation that runs in the background, in the order of the starts. Owns its buffer until it is done.
///
/// On host memory the group's own worker executes it, on a GPU the group's own stream. Dropping it does not cancel the operation;
/// the buffer is then freed when the operation ends.
///
/// [`wait`](Self::wait) blocks the thread. `work.await` does not, in any async runtime: see [`WorkFuture`].
#[derive(Debug)]
#[must_use = "an operation that nobody waits for fails unseen"]
pub struct Work<B> {
    inner: Inner<B>,
}

enum Inner<B> {
    Worker(oneshot::Receiver<(B, Result<()>)>),
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
    pub(crate) fn new() -> (oneshot::Sender<(B, Result<()>)>, Self) {
        let (sender, done) = oneshot::channel();
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
            Inner::Worker(done) => block_on(done).map_err(|oneshot::Canceled| worker_died()),
            Inner::Stream(mut call) => {
                let outcome = call.work.wait();
                Ok((call.join()?, outcome))
            }
        }
    }
}

impl<B: Send + 'static> IntoFuture for Work<B> {
    type Output = Result<B>;
    type IntoFuture = WorkFuture<B>;

    fn into_future(self) -> WorkFuture<B> {
        match self.inner {
            Inner::Worker(done) => WorkFuture { pending: Pending::Worker(done) },
            Inner::Stream(_) => {
                WorkFuture { pending: self.on_thread().map_or_else(Pending::Failed, Pending::Thread) }
            }
        }
    }
}

impl<B: Send + 'static> Work<B> {
    /// Waits on a thread of its own.
    fn on_thread(self) -> Result<oneshot::Receiver<Result<B>>> {
        let (sender, done) = oneshot::channel();
        let wait = move || {
            // The caller may have stopped waiting; the buffer is then freed here.
            let _ = sender.send(self.wait());
        };
        let started = thread::Builder::new().name("ryz-await".into()).spawn(wait);
        started.map_err(Error::system("cannot start a thread that waits for an operation on a GPU"))?;
        Ok(done)
    }
}

/// The end of an operation, with [`Work::wait`]'s result. It needs no runtime, and works in any.
///
/// On host memory the group's worker wakes the task. A GPU wakes no task: there a new thread waits, at most until the group's
/// timeout. If that is too expensive for each operation, [`Work::join`] blocks neither thread nor task, and
/// [`ProcessGroup::synchronize`](crate::ProcessGroup::synchronize) waits for many.
///
/// At its end, that thread orders the compute stream after the operation, as `wait` does: an engine that captures this stream
/// itself must not do so in the meantime.
///
/// Dropping it does not cancel the operation.
#[derive(Debug)]
#[must_use = "the operation runs anyway; without `.await`, nobody sees its error"]
pub struct WorkFuture<B> {
    pending: Pending<B>,
}

#[derive(Debug)]
enum Pending<B> {
    /// The group's worker sends the outcome.
    Worker(oneshot::Receiver<(B, Result<()>)>),
    /// A waiting thread sends it.
    Thread(oneshot::Receiver<Result<B>>),
    /// The thread could not be started.
    Failed(Error),
}

impl<B> Future for WorkFuture<B> {
    type Output = Result<B>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<B>> {
        match &mut self.pending {
            Pending::Worker(done) => Pin::new(done).poll(context).map(|outcome| {
                let (buffer, result) = outcome.map_err(|oneshot::Canceled| worker_died())?;
                result.map(|()| buffer)
            }),
            Pending::Thread(done) => Pin::new(done)
                .poll(context)
                .map(|outcome| outcome.map_err(|oneshot::Canceled| worker_died())?),
            Pending::Failed(error) => Poll::Ready(Err(error.clone())),
        }
    }
}

fn worker_died() -> Error {
    Error::Transport("the thread that ran this operation has died".into())
}

/// Waits on this thread, also within a task of a runtime.
fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match Pin::new(&mut future).poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::ProcessGroup;
    use crate::types::operation::ReduceOp;
    use crate::types::rank::Rank;
    use std::sync::mpsc;

    use crate::testing::{LATE, in_time};

    /// Runs both ranks of a group, each on a thread with a deadline.
    fn both(rank: impl Fn(&mut ProcessGroup) + Send + Sync + Copy + 'static) {
        in_time(move || {
            std::thread::scope(|scope| {
                for mut group in ProcessGroup::loopback(2) {
                    scope.spawn(move || rank(&mut group));
                }
            });
        });
    }

    #[test]
    fn an_operation_is_awaited_without_a_runtime() {
        both(|group| {
            let work = group.all_reduce_async(vec![1.0f32; 1000], ReduceOp::Sum).unwrap();
            assert_eq!(block_on(work.into_future()).unwrap(), [2.0; 1000]);
        });
    }

    #[test]
    fn operations_are_awaited_in_tokio_while_other_tasks_run() {
        both(|group| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let me = group.rank();
            runtime.block_on(async {
                let (tell, told) = tokio::sync::oneshot::channel();
                // Rank 1 sends only after its other task has run, on the only thread.
                let other = async { tell.send(()).unwrap() };
                let message = async {
                    if me == Rank(0) {
                        return group.recv_async(vec![0u32; 3], Rank(1)).unwrap().await.unwrap();
                    }
                    told.await.unwrap();
                    group.send_async(vec![7u32; 3], Rank(0)).unwrap().await.unwrap()
                };
                let (message, ()) = tokio::join!(message, other);
                assert_eq!(message, [7; 3]);
            });
        });
    }

    #[test]
    fn waiting_within_a_task_blocks_and_ends() {
        both(|group| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                for _ in 0..500 {
                    let work = group.all_reduce_async([1u8], ReduceOp::Sum).unwrap();
                    assert_eq!(work.wait().unwrap(), [2]);
                }
            });
        });
    }

    #[test]
    fn a_future_that_is_dropped_leaves_the_group_usable() {
        both(|group| {
            drop(group.all_reduce_async(vec![1i32; 10], ReduceOp::Sum).unwrap().into_future());
            let work = group.all_reduce_async(vec![2i32; 10], ReduceOp::Sum).unwrap();
            assert_eq!(block_on(work.into_future()).unwrap(), [4; 10]);
        });
    }

    /// A call on a GPU, which ends when the sender is dropped.
    struct OnGpu {
        end: mpsc::Receiver<()>,
        wait: Result<()>,
        join: Result<()>,
    }

    impl StreamWork for OnGpu {
        fn wait(&mut self) -> Result<()> {
            assert_eq!(self.end.recv_timeout(LATE), Err(mpsc::RecvTimeoutError::Disconnected));
            self.wait.clone()
        }

        fn check(&self) -> Result<()> {
            Ok(())
        }

        fn join(&mut self) -> Result<()> {
            self.join.clone()
        }
    }

    /// Returns the result of a task that awaits a call with these outcomes. The call ends after the task has begun to wait.
    fn awaited(wait: Result<()>, join: Result<()>) -> Result<Vec<u8>> {
        let (ends, end) = mpsc::channel();
        let mut future = Work::on_stream(vec![5u8], Box::new(OnGpu { end, wait, join })).into_future();
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(Pin::new(&mut future).poll(&mut context).is_pending(), "the task is not blocked");
        drop(ends);
        block_on(future)
    }

    #[test]
    fn a_task_that_awaits_an_operation_on_a_stream_is_not_blocked_and_gets_its_error() {
        let broke = || Err(Error::Transport("a link broke".into()));
        assert_eq!(awaited(Ok(()), Ok(())).unwrap(), [5]);
        for outcome in [awaited(broke(), Ok(())), awaited(Ok(()), broke()), awaited(broke(), broke())] {
            assert!(outcome.unwrap_err().to_string().contains("a link broke"));
        }
    }
}
