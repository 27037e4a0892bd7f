//! The standard output and standard error of a launcher.
//!
//! One dedicated thread writes to each stream. If the stream's reader stops reading (a paused pager, a full pipe, Ctrl-S), that
//! blocks this thread and nothing else. A blocked thread does not keep a process from exiting.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tokio::sync::Semaphore;

/// Number of bytes that [`Stream::write`] queues before it waits, and that [`Stream::say`] may queue.
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

/// Returns standard error: the same stream as [`stdout`] if both lead to the same file, such as a terminal.
pub fn stderr() -> &'static Stream {
    static STDERR: LazyLock<Stream> = LazyLock::new(|| {
        if is_same_file(&io::stdout(), &io::stderr()) {
            stdout().clone()
        } else {
            Stream::start("ryz-stderr", io::stderr())
        }
    });
    &STDERR
}

fn is_same_file(a: &impl AsFd, b: &impl AsFd) -> bool {
    let identity = |file: &rustix::fs::Stat| (file.st_dev, file.st_ino);
    let [a, b] = [rustix::fs::fstat(a), rustix::fs::fstat(b)];
    a.is_ok_and(|a| b.is_ok_and(|b| identity(&a) == identity(&b)))
}

/// Output that was not written.
#[derive(Debug)]
pub struct Lost {
    /// The reason, as an error message.
    pub why: String,
    /// True for standard output, false for standard error.
    pub is_stdout: bool,
}

/// Waits until both streams have written their queues. Gives up once neither has written anything for `patience`: a slow reader
/// gets everything, one that has stopped does not hold up the launcher. Returns the first loss of a stream whose reader has not left:
/// to a full disk, or to this haste.
pub fn flush(patience: Duration) -> Option<Lost> {
    wait(patience, || stdout().is_flushed() && stderr().is_flushed());
    let streams = [(true, "standard output", stdout()), (false, "standard error", stderr())];
    streams.into_iter().find_map(|(is_stdout, name, stream)| {
        let state = stream.0.state();
        let why = match (state.error, state.unwritten()) {
            (Some(Errno::PIPE), _) | (None, 0) => return None,
            (Some(error), _) => io::Error::from(error).to_string(),
            (None, bytes) => format!(
                "its reader has read nothing for {patience:?}, and up to {bytes} bytes are left; let it read on, or write to a file"
            ),
        };
        Some(Lost { why: format!("cannot write to {name}: {why}"), is_stdout })
    })
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

/// One of the writers of a stream whose lines carry a prefix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Writer {
    /// A number of its own.
    pub(crate) id: usize,
    /// The prefix of its lines.
    pub(crate) prefix: String,
}

/// The line at the end of a stream.
#[derive(Debug, Default)]
struct LastLine {
    /// The writer whose line has not ended.
    open: Option<usize>,
    /// True if the next text overwrites this line, because it ends with a carriage return.
    is_returned: bool,
    /// The writers whose line was broken by another writer.
    broken: BTreeSet<usize>,
}

impl LastLine {
    /// Appends a writer's bytes to `out`. Each line begins with the writer's prefix, also after a carriage return. A line of
    /// another writer that has not ended is broken first.
    fn append(&mut self, writer: &Writer, bytes: &[u8], out: &mut Vec<u8>) {
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            let is_own = self.open == Some(writer.id);
            let is_broken = self.broken.remove(&writer.id);
            if piece == b"\n" && is_broken {
                continue;
            }
            if !is_own {
                self.break_line(out);
            }
            let is_bare = piece == b"\r" || (is_own && self.is_returned && piece == b"\n");
            if !is_bare && (!is_own || self.is_returned) {
                out.extend_from_slice(writer.prefix.as_bytes());
            }
            out.extend_from_slice(piece);
            self.open = (!piece.ends_with(b"\n")).then_some(writer.id);
            self.is_returned = piece.ends_with(b"\r");
        }
    }

    /// Ends the line that has not ended, if there is one, for text of another writer.
    fn break_line(&mut self, out: &mut Vec<u8>) {
        if let Some(writer) = self.open.take() {
            out.push(b'\n');
            self.broken.insert(writer);
        }
    }

    /// Ends the line of a writer that writes no more.
    fn end(&mut self, writer: &Writer, out: &mut Vec<u8>) {
        if self.open == Some(writer.id) {
            out.push(b'\n');
            self.open = None;
        }
        self.broken.remove(&writer.id);
    }
}

#[derive(Debug, Default)]
struct State {
    queued: Vec<u8>,
    last_line: LastLine,
    /// The part of `room` that `queued` occupies.
    reserved: usize,
    /// The part of `queued` that [`Stream::say`] has queued.
    said: usize,
    /// Number of bytes that the thread has taken from the queue, and not written yet.
    writing: usize,
    /// The error of the write that failed. From then on, everything is discarded.
    error: Option<Errno>,
}

impl State {
    /// Returns the number of bytes that wait for the reader.
    fn unwritten(&self) -> usize {
        self.writing + self.queued.len()
    }
}

impl Stream {
    pub(crate) fn start(name: &str, to: impl AsFd + Send + 'static) -> Self {
        let shared =
            Arc::new(Shared { state: Mutex::default(), filled: Condvar::new(), room: Semaphore::new(LIMIT) });
        let writer = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            // On a terminal with `stty tostop`, the signal would stop a process that is not in the foreground.
            let _ = nix::sys::signal::SigSet::from(nix::sys::signal::Signal::SIGTTOU).thread_block();
            writer.run(&to);
        });
        if let Err(error) = thread {
            // A system without a thread for this starts no rank either. Nothing runs yet, so this may block.
            let told = format!("ryz: no thread for {name}: {error}; nothing more is written there\n");
            let _ = io::Write::write_all(&mut io::stderr(), told.as_bytes());
            shared.close(Errno::AGAIN);
        }
        Self(shared)
    }

    /// Queues the output of a writer: as it is, or in lines with the prefix of the writer, if there is one. Waits while the queue
    /// is full, so that a rank cannot write faster than this stream's reader reads. After a failed write, discards the output.
    pub(crate) async fn write(&self, writer: Option<&Writer>, bytes: &[u8]) {
        let reserved = bytes.len().min(LIMIT);
        if let Ok(room) = self.0.room.acquire_many(reserved as u32).await {
            room.forget();
            self.0.queue(|state| {
                if let Some(writer) = writer {
                    state.last_line.append(writer, bytes, &mut state.queued);
                } else {
                    state.last_line.break_line(&mut state.queued);
                    state.queued.extend_from_slice(bytes);
                }
                state.reserved += reserved;
            });
        }
    }

    /// Ends the last line of a writer that writes no more.
    pub(crate) fn end(&self, writer: &Writer) {
        self.0.queue(|state| state.last_line.end(writer, &mut state.queued));
    }

    /// Queues a message of the launcher itself, of whole lines. Never waits: the message is discarded if the queue is far too long,
    /// or after a failed write.
    pub fn say(&self, text: &str) {
        self.0.queue(|state| {
            if state.said + text.len() <= LIMIT {
                state.said += text.len();
                state.last_line.break_line(&mut state.queued);
                state.queued.extend_from_slice(text.as_bytes());
            }
        });
    }

    /// Waits as [`flush`] does, for this stream alone.
    pub fn drain(&self, patience: Duration) {
        wait(patience, || self.is_flushed());
    }

    /// Returns true if everything has been written that ever will be.
    pub fn is_flushed(&self) -> bool {
        let state = self.0.state();
        state.error.is_some() || state.unwritten() == 0
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

    /// Writes until a write fails, each time everything that has been queued meanwhile.
    fn run(&self, to: &impl AsFd) {
        let mut batch = Vec::new();
        loop {
            batch.clear();
            let reserved = {
                let waited = self.filled.wait_while(self.state(), |state| state.queued.is_empty());
                let mut state = waited.unwrap_or_else(PoisonError::into_inner);
                std::mem::swap(&mut state.queued, &mut batch);
                state.writing = batch.len();
                state.said = 0;
                std::mem::take(&mut state.reserved)
            };
            if let Err(error) = write_all(to, &batch, |count| self.state().writing -= count) {
                return self.close(error);
            }
            self.room.add_permits(reserved);
        }
    }

    /// Changes the queue and wakes the thread, unless a write has failed.
    fn queue(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        if state.error.is_none() {
            change(&mut state);
            self.filled.notify_one();
        }
    }

    fn close(&self, error: Errno) {
        *self.state() = State { error: Some(error), ..State::default() };
        self.room.close();
    }
}

/// Writes all bytes, also to a stream in non-blocking mode, and calls `wrote` with the number of each piece.
pub fn write_all(to: &impl AsFd, mut bytes: &[u8], mut wrote: impl FnMut(usize)) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(to, &bytes[..bytes.len().min(PIECE)]) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => {
                WRITTEN.fetch_add(count as u64, Ordering::Relaxed);
                wrote(count);
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
        stream.drain(patience);
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
        runtime().block_on(stream.write(None, b"two\n"));
        stream.say("three\n");
        assert!(is_flushed_in(&stream, LONG));
        let mut bytes = [0; 14];
        reader.read_exact(&mut bytes).expect("read");
        assert_eq!(&bytes, b"one\ntwo\nthree\n");
    }

    /// Returns the text that writers 0, 1, … give, each with its number as prefix.
    fn lines(writes: &[(usize, &str)]) -> String {
        let (mut line, mut out) = (LastLine::default(), Vec::new());
        for (id, text) in writes {
            line.append(&Writer { id: *id, prefix: format!("{id}> ") }, text.as_bytes(), &mut out);
        }
        String::from_utf8(out).expect("UTF-8")
    }

    #[test]
    fn every_line_has_one_prefix_however_it_is_cut() {
        assert_eq!(lines(&[(0, "one\ntwo\n")]), "0> one\n0> two\n");
        assert_eq!(lines(&[(0, "o"), (0, "n"), (0, "e\n"), (0, "\n")]), "0> one\n0> \n");
    }

    #[test]
    fn a_line_that_is_overwritten_keeps_its_prefix() {
        assert_eq!(lines(&[(0, "\rstep 1"), (0, "\rstep 2\n")]), "\r0> step 1\r0> step 2\n");
        assert_eq!(lines(&[(0, "step 1\r"), (0, "step 2\r\n")]), "0> step 1\r0> step 2\r\n");
        assert_eq!(lines(&[(0, "dos\r"), (0, "\nunix\n")]), "0> dos\r\n0> unix\n");
    }

    #[test]
    fn a_line_that_another_writer_breaks_goes_on_in_a_line_of_its_own() {
        assert_eq!(
            lines(&[(0, "half"), (1, "whole\n"), (0, " a line\n")]),
            "0> half\n1> whole\n0>  a line\n"
        );
        // Its end alone is no line.
        assert_eq!(
            lines(&[(0, "one"), (1, "two\n"), (0, "\n"), (0, "three\n")]),
            "0> one\n1> two\n0> three\n"
        );
    }

    #[test]
    fn a_message_of_the_launcher_begins_a_line_and_an_end_completes_one() {
        let (mut reader, writer) = pipe().expect("a pipe");
        let stream = Stream::start("test", writer);
        let rank = Writer { id: 0, prefix: "0> ".into() };
        runtime().block_on(stream.write(Some(&rank), b"half"));
        stream.say("ryz: message\n");
        runtime().block_on(stream.write(Some(&rank), b"rest"));
        stream.end(&rank);
        assert!(is_flushed_in(&stream, LONG));
        let wanted = b"0> half\nryz: message\n0> rest\n";
        let mut bytes = vec![0; wanted.len()];
        reader.read_exact(&mut bytes).expect("read");
        assert_eq!(bytes, wanted);
    }

    proptest::proptest! {
        /// However the ranks' output is cut and mixed, the bytes of each rank arrive in order, and each line has one writer.
        #[test]
        fn the_lines_of_writers_never_mix(writes in proptest::collection::vec((0..3_usize, "[ab\n]{0,6}"), 0..20)) {
            let out = lines(&writes.iter().map(|(id, text)| (*id, text.as_str())).collect::<Vec<_>>());
            for id in 0..3 {
                let prefix = format!("{id}> ");
                let shown: String = out.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
                let wrote: String = writes.iter().filter(|(from, _)| *from == id).map(|(_, text)| text.replace('\n', "")).collect();
                proptest::prop_assert_eq!(shown, wrote);
            }
            proptest::prop_assert!(out.lines().all(|line| line.matches("> ").count() == 1));
        }
    }

    #[test]
    fn a_reader_that_does_not_read_holds_up_ranks_and_not_the_launcher() {
        let (mut reader, writer) = pipe().expect("a pipe");
        let stream = Stream::start("test", writer);
        let line = vec![b'x'; 64 << 10];
        let more = async {
            for _ in 0..100 {
                stream.write(None, &line).await;
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
            .block_on(async { tokio::time::timeout(LONG, stream.write(None, b"more\n")).await })
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
                tokio::time::timeout(LONG, stream.write(None, &line)).await.expect("discarded");
            }
        });
        assert!(is_flushed_in(&stream, LONG));
    }
}
