//! A thread with its own tokio runtime, so that blocking callers work inside and outside any runtime.

use std::future::Future;
use std::io;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

/// Runs futures until it is dropped, which cancels them.
#[derive(Debug)]
pub struct RuntimeThread {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl RuntimeThread {
    /// Starts the thread. Also inside another runtime, it neither waits nor panics.
    ///
    /// # Errors
    /// Returns the operating system's error, when it gives no thread.
    pub fn start(name: &str) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let (hand_over, handed_over) = std::sync::mpsc::channel::<Runtime>();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            if let Ok(runtime) = handed_over.recv() {
                let _ = runtime.block_on(stopped);
            }
        });
        match thread {
            Ok(thread) => {
                let _ = hand_over.send(runtime);
                Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
            }
            Err(error) => {
                // Dropping it would wait, which panics inside another runtime.
                runtime.shutdown_background();
                Err(error)
            }
        }
    }

    /// Returns the handle that starts tasks there.
    pub const fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs a future there and blocks for its result; `None` at the deadline, or if it panicked.
    pub fn block_on<T: Send + 'static>(
        &self,
        deadline: Instant,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (send, receive) = std::sync::mpsc::sync_channel(1);
        let task = self.handle.spawn(async move {
            let _ = send.send(future.await);
        });
        let wait = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let result = receive.recv_timeout(wait).ok();
        if result.is_none() {
            task.abort();
        }
        result
    }

    /// Lets it run until the process ends, whatever its tasks wait for then.
    pub fn detach(mut self) -> Handle {
        std::mem::forget(self.stop.take());
        self.thread = None;
        self.handle.clone()
    }
}

impl Drop for RuntimeThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
