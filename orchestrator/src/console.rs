//! The standard output and standard error of a launcher.
//!
//! One dedicated thread writes to each stream. If the stream's reader stops reading (a paused pager, a full pipe, Ctrl-S), that
//! blocks this thread and nothing else. A blocked thread does not keep a process from exiting.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tokio::sync::Semaphore;

/// Number of bytes that [`Stream::write`] queues before it waits. [`Stream::say`] may queue twice as many.
const LIMIT: usize = 1 << 20;
/// Maximum wait of [`flush`] after [`shorten_flush_timeout`].
const HURRY: Duration = Duration::from_millis(200);
/// Time of the call of [`shorten_flush_timeout`].
static HURRIED: OnceLock<Instant> = OnceLock::new();
/// Number of bytes that the readers of all streams have taken.
static WRITTEN: AtomicU64 = AtomicU64::new(0);
/// Maximum number of bytes of one write: a longer one shows no progress while a slow reader reads.
const PIECE: usize = 16 << 10;

/// Returns standard output.
pub fn stdout() -> &'static Stream {
    static STDOUT: LazyLock<Stream> = LazyLock::new(|| Stream::start("ryz-stdout", io::stdout()));
    &STDOUT
}

/// Returns standard error.
pub fn stderr() -> &'static Stream {
    static STDERR: LazyLock<Stream> = LazyLock::new(|| Stream::start("ryz-stderr", io::stderr()));
    &STDERR
}

/// Waits until both streams have written their queues. Gives up once neither has written anything for `patience`: a slow reader
/// gets everything, one that has stopped does not hold up the launcher.
pub fn flush(patience: Duration) {
    wait(patience, || stdout().is_flushed() && stderr().is_flushed());
}

/// Limits the waits of [`flush`] to a short time from now on, including one in progress: the process that the user sees has
/// died.
pub(crate) fn shorten_flush_timeout() {
    let _ = HURRIED.set(Instant::now());
}

/// Waits until something is done that depends on the readers of the streams. Gives up once they have read nothing for
/// `patience`, and soon after [`shorten_flush_timeout`].
pub(crate) fn wait(patience: Duration, is_done: impl Fn() -> bool) {
    let (mut written, mut deadline) = (WRITTEN.load(Ordering::Relaxed), Instant::now() + patience);
    while !is_done() {
        let now = Instant::now();
        let before = std::mem::replace(&mut written, WRITTEN.load(Ordering::Relaxed));
        if written != before {
            deadline = now + patience;
        }
        if deadline <= now || HURRIED.get().is_some_and(|since| *since + HURRY <= now) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A queue of text, and the thread that writes it.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Notified when something has been queued.
    filled: Condvar,
    /// Number of bytes that [`Stream::write`] may still queue.
    room: Semaphore,
}

#[derive(Debug, Default)]
struct State {
    queued: Vec<u8>,
    /// The part of `room` that `queued` occupies.
    reserved: usize,
    /// True while the thread writes the bytes that it took from the queue.
    writing: bool,
    /// True once the stream has no reader: everything is discarded.
    closed: bool,
}

impl Stream {
    pub(crate) fn start(name: &str, to: impl AsFd + Send + 'static) -> Self {
        let shared =
            Arc::new(Shared { state: Mutex::default(), filled: Condvar::new(), room: Semaphore::new(LIMIT) });
        let writer = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || writer.run(&to));
        if let Err(error) = thread {
            // A system without a thread for this starts no rank either. Nothing runs yet, so this may block.
            eprintln!("ryz: no thread for {name}: {error}; nothing more is written there");
            shared.close();
        }
        Self(shared)
    }

    /// Queues the output of a rank. Waits while the queue is full, so that a rank cannot write faster than this stream's reader
    /// reads. Once the stream has no reader, `line` is discarded.
    pub async fn write(&self, line: &[u8]) {
        let reserved = line.len().min(LIMIT);
        if let Ok(room) = self.0.room.acquire_many(reserved as u32).await {
            room.forget();
            let mut state = self.0.state();
            if !state.closed {
                state.queued.extend_from_slice(line);
                state.reserved += reserved;
                self.0.filled.notify_one();
            }
        }
    }

    /// Queues a message of the launcher itself. Never waits: the message is discarded if the queue is far too long, or if the
    /// stream has no reader.
    pub fn say(&self, text: &str) {
        let mut state = self.0.state();
        if !state.closed && state.queued.len() + text.len() <= 2 * LIMIT {
            state.queued.extend_from_slice(text.as_bytes());
            self.0.filled.notify_one();
        }
    }

    /// Returns true if everything has been written that ever will be.
    fn is_flushed(&self) -> bool {
        let state = self.0.state();
        state.closed || (!state.writing && state.queued.is_empty())
    }
}

/// The writer of a log. Each `write` is a whole message, and is queued with [`Stream::say`].
impl io::Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.say(&String::from_utf8_lossy(bytes));
        Ok(bytes.len())
    }

    /// Does nothing, because a log must not wait: see [`flush`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes until the stream has no reader, each time everything that has been queued meanwhile.
    fn run(&self, to: &impl AsFd) {
        let mut batch = Vec::new();
        loop {
            batch.clear();
            let reserved = {
                let waited = self.filled.wait_while(self.state(), |state| state.queued.is_empty());
                let mut state = waited.unwrap_or_else(PoisonError::into_inner);
                state.writing = true;
                std::mem::swap(&mut state.queued, &mut batch);
                std::mem::take(&mut state.reserved)
            };
            if write_all(to, &batch).is_err() {
                return self.close();
            }
            self.room.add_permits(reserved);
            self.state().writing = false;
        }
    }

    fn close(&self) {
        *self.state() = State { closed: true, ..State::default() };
        self.room.close();
    }
}

fn write_all(to: &impl AsFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(to, &bytes[..bytes.len().min(PIECE)]) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => {
                WRITTEN.fetch_add(count as u64, Ordering::Relaxed);
                bytes = &bytes[count..];
            }
            Err(Errno::INTR) => {}
            // Another process that shares the stream has set it to non-blocking mode.
            Err(Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::new(to, PollFlags::OUT)], None);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, pipe};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn is_flushed_in(stream: &Stream, patience: Duration) -> bool {
        wait(patience, || stream.is_flushed());
        stream.is_flushed()
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
    }

    #[test]
    fn what_is_written_and_said_arrives_in_order() {
        let (mut reader, writer) = pipe().expect("a pipe");
        let stream = Stream::start("test", writer);
        stream.say("one\n");
        runtime().block_on(stream.write(b"two\n"));
        stream.say("three\n");
        assert!(is_flushed_in(&stream, LONG));
        let mut bytes = [0; 14];
        reader.read_exact(&mut bytes).expect("read");
        assert_eq!(&bytes, b"one\ntwo\nthree\n");
    }

    #[test]
    fn a_reader_that_does_not_read_holds_up_ranks_and_not_the_launcher() {
        let (mut reader, writer) = pipe().expect("a pipe");
        let stream = Stream::start("test", writer);
        let line = vec![b'x'; 64 << 10];
        let more = async {
            for _ in 0..100 {
                stream.write(&line).await;
            }
        };
        let waits =
            runtime().block_on(async { tokio::time::timeout(Duration::from_millis(200), more).await });
        assert!(waits.is_err(), "6 MB fit into the queue");
        stream.say("the end\n");
        assert!(!is_flushed_in(&stream, Duration::from_millis(10)));
        // The bytes that fit are kept, the rest is discarded: this ends.
        for _ in 0..100 {
            stream.say(&"y".repeat(64 << 10));
        }
        let read = std::thread::spawn(move || {
            let (mut bytes, mut all) = (vec![0; 64 << 10], Vec::new());
            while !all.windows(8).any(|window| window == b"the end\n") {
                let count = reader.read(&mut bytes).expect("read");
                all.extend_from_slice(&bytes[..count]);
            }
            std::io::copy(&mut reader, &mut std::io::sink()).expect("read");
        });
        assert!(is_flushed_in(&stream, LONG), "it goes on when the reader reads again");
        runtime()
            .block_on(async { tokio::time::timeout(LONG, stream.write(b"more\n")).await })
            .expect("room");
        drop(read);
    }

    #[test]
    fn output_that_nobody_reads_any_more_is_discarded() {
        let (reader, writer) = pipe().expect("a pipe");
        let stream = Stream::start("test", writer);
        drop(reader);
        let line = vec![b'x'; 64 << 10];
        runtime().block_on(async {
            for _ in 0..100 {
                tokio::time::timeout(LONG, stream.write(&line)).await.expect("discarded");
            }
        });
        assert!(is_flushed_in(&stream, LONG));
    }
}
