//! The output of ranks: forwarded as it comes with a prefix on each line, written to log files, and with its end kept.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use ryzanstein_process_group::{Rank, RuntimeThread};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::unix::pipe;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::job::LaunchError;
use crate::console::{self, Stream, Writer};

/// Number of bytes that are read at a time. A line that is longer is forwarded in pieces.
const PIECE: usize = 64 << 10;
/// Time for the rest of a line to arrive: programs often write a line in several pieces, and the lines of ranks should not break
/// each other. A line without an end, such as a progress bar or a prompt, is shown after it.
const PAUSE: Duration = Duration::from_millis(50);
/// Interval between two attempts to write to a log that is a full pipe.
const FULL: Duration = Duration::from_millis(10);
/// Number of bytes that are kept of the end of a stream.
const BYTES_KEPT: usize = 16 << 10;

/// The place where a rank's output is shown.
#[derive(Clone, Debug)]
pub(super) struct Sink {
    pub(super) stream: Stream,
    /// The writer, for lines with a prefix. Without one, the bytes are forwarded as they are.
    pub(super) writer: Option<Writer>,
}

/// The end of a stream.
pub(super) type Tail = Arc<Mutex<Vec<u8>>>;

/// The log file of one stream of a rank.
#[derive(Clone, Debug)]
pub(super) struct Log {
    rank: Rank,
    path: PathBuf,
    /// Writes never wait, if the file is a pipe.
    file: Arc<File>,
}

impl Log {
    /// Opens the logs of a rank's standard output and standard error, for all epochs, in this folder, and empties them.
    pub(super) fn open(rank: Rank, folder: &Path) -> Result<[Self; 2], LaunchError> {
        std::fs::create_dir_all(folder).map_err(LaunchError::system::<io::Error>(format!(
            "--log-dir: cannot create {}",
            folder.display()
        )))?;
        let open = |name: &str| -> Result<Self, LaunchError> {
            let path = folder.join(name);
            let file = open_log(&path).map_err(LaunchError::system::<io::Error>(format!(
                "--log-dir: cannot open {}",
                path.display()
            )))?;
            Ok(Self { rank, path, file: Arc::new(file) })
        };
        Ok([open("stdout.log")?, open("stderr.log")?])
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    // Neither opening a pipe without a reader nor writing to a full one may block.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    // Always appends: late output of an epoch may arrive when the next one has begun.
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
        .map_err(|error| match error.raw_os_error() {
            Some(code) if code == Errno::NXIO.raw_os_error() => {
                io::Error::other("it is a pipe without a reader, or a socket; start the reader first")
            }
            _ => error,
        })?;
    // Only a regular file has a length.
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

/// The thread that reads the output of all ranks. A thread for each stream would make every fork copy its mappings.
#[derive(Debug)]
pub(super) struct Output {
    runtime: Handle,
    unwritten: Arc<Mutex<Vec<String>>>,
}

impl Output {
    pub(super) fn start() -> io::Result<Self> {
        // At the end, a log may still wait for its disk or its reader.
        let runtime = RuntimeThread::start("ryz-output")?.detach();
        Ok(Self { runtime, unwritten: Arc::default() })
    }

    /// Reads a rank's stream to its end: into the log, and to the sink, if there are any.
    pub(super) fn forward(
        &self,
        stream: OwnedFd,
        to: Option<Sink>,
        log: Option<Log>,
    ) -> io::Result<(Tail, JoinHandle<()>)> {
        let stream = {
            // A tokio pipe belongs to the runtime in whose context it is created.
            let _context = self.runtime.enter();
            pipe::Receiver::from_owned_fd(stream)?
        };
        let log = Logger { log, unwritten: Arc::clone(&self.unwritten) };
        let tail = Tail::default();
        let reader = self.runtime.spawn(pump(stream, to, log, Arc::clone(&tail)));
        Ok((tail, reader))
    }

    /// Waits until the streams have been read to their end. Their writers are dead by now, so this takes no time unless nobody
    /// reads the launcher's own output or a log. Returns false if the end of a stream is lost.
    pub(super) fn drain(&self, readers: &[JoinHandle<()>], patience: Duration) -> bool {
        let unfinished = || readers.iter().filter(|reader| !reader.is_finished()).count();
        console::wait(patience, || unfinished() == 0);
        let streams = unfinished();
        if streams > 0 {
            let text = format!(
                "the end of the output of {streams} streams is lost: nobody read the launcher's output, or a log, for {patience:?}"
            );
            console::stderr().say(&format!("ryz: {text}\n"));
            locked(&self.unwritten).push(text);
        }
        streams == 0
    }

    /// Returns the logs that could not be written to their end, and the reasons.
    pub(super) fn unwritten(&self) -> Vec<String> {
        locked(&self.unwritten).clone()
    }
}

/// Writes a log as long as that works.
struct Logger {
    log: Option<Log>,
    unwritten: Arc<Mutex<Vec<String>>>,
}

impl Logger {
    async fn write(&mut self, bytes: &[u8]) {
        if let Some(Log { rank, path, file }) = &self.log
            && let Err(error) = write_all(file, bytes).await
        {
            // A full disk must not end the job. The output is still forwarded.
            let text = format!(
                "cannot write {}: {error}; the output of rank {rank} is not logged any more",
                path.display()
            );
            console::stderr().say(&format!("ryz: {text}\n"));
            locked(&self.unwritten).push(text);
            self.log = None;
        }
    }
}

/// Writes all bytes. Waits for the reader of a pipe, as a rank waits for that of its output.
async fn write_all(mut file: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(FULL).await,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn pump(mut stream: impl AsyncRead + Unpin, to: Option<Sink>, mut log: Logger, tail: Tail) {
    let mut buffer = Vec::with_capacity(PIECE);
    // Time at which the unfinished line at the end of the buffer is shown.
    let mut due: Option<Instant> = None;
    loop {
        let before = buffer.len();
        let mut piece = (&mut stream).take((PIECE - before) as u64);
        let read = piece.read_buf(&mut buffer);
        let read = match due {
            Some(due) => tokio::time::timeout_at(due, read).await.ok(),
            None => Some(read.await),
        };
        let is_end = matches!(read, Some(Ok(0) | Err(_)));
        log.write(&buffer[before..]).await;
        remember(&tail, &buffer[before..]);
        let Some(Sink { stream: out, writer }) = &to else {
            buffer.clear();
            if is_end {
                return;
            }
            continue;
        };
        let lines = buffer.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let is_too_long = lines == 0 && buffer.len() == PIECE;
        let is_all_ready = is_end || read.is_none() || writer.is_none() || is_too_long;
        let ready = if is_all_ready { buffer.len() } else { lines };
        if ready > 0 {
            out.write(writer.as_ref(), &buffer[..ready]).await;
            buffer.drain(..ready);
            due = None;
        }
        if !buffer.is_empty() {
            due.get_or_insert(Instant::now() + PAUSE);
        }
        if is_end {
            if let Some(writer) = writer {
                out.end(writer);
            }
            return;
        }
    }
}

fn remember(tail: &Tail, bytes: &[u8]) {
    let mut tail = locked(tail);
    tail.extend_from_slice(bytes);
    // Rarely, because it moves what is kept.
    if tail.len() > 4 * BYTES_KEPT {
        let excess = tail.len() - BYTES_KEPT;
        tail.drain(..excess);
    }
}

/// Returns the end of a stream, from the beginning of a line if the end has several.
pub(super) fn text(tail: &Tail) -> String {
    let tail = locked(tail);
    let cut = tail.len().saturating_sub(BYTES_KEPT);
    let kept = &tail[cut..];
    let first =
        if cut == 0 { 0 } else { kept.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1) };
    String::from_utf8_lossy(&kept[first..]).into_owned()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until the streams have been read to their end, for this time at most: a process that the writer left behind may hold one
/// open.
pub(super) fn wait_for_end(readers: &[&JoinHandle<()>], most: Duration) {
    let deadline = std::time::Instant::now() + most;
    while !readers.iter().all(|reader| reader.is_finished()) && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pumped(text: &str) -> Tail {
        let tail = Tail::default();
        let log = Logger { log: None, unwritten: Arc::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(pump(text.as_bytes(), None, log, Arc::clone(&tail)));
        tail
    }

    #[test]
    fn the_end_is_kept_from_the_beginning_of_a_line() {
        let lines = (0..20_000).map(|i| format!("line {i}\n")).collect::<Vec<_>>().concat();
        let end = text(&pumped(&lines));
        assert!(end.starts_with("line 1") && end.ends_with("line 19999\n"), "{}", &end[..40]);
        assert!(end.len() <= BYTES_KEPT && end.len() > BYTES_KEPT / 2);
        assert_eq!(text(&pumped("short")), "short");
    }

    #[test]
    fn lines_of_two_ranks_that_write_much_are_not_broken() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let stream = Stream::start("test", writer);
        let lines = (0..400_000).map(|i| format!("{:05}\n", i % 100_000)).collect::<Vec<_>>().concat();
        let forward = |id: usize| {
            let to = Sink { stream: stream.clone(), writer: Some(Writer { id, prefix: format!("{id}> ") }) };
            let log = Logger { log: None, unwritten: Arc::default() };
            pump(lines.as_bytes(), Some(to), log, Tail::default())
        };
        // More than the queue holds, so that the two take turns. Each line has its prefix, five digits and an end.
        let read = std::thread::spawn(move || {
            let mut shown = vec![0; 2 * 400_000 * 9];
            io::Read::read_exact(&mut reader, &mut shown).map(|()| shown)
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async { tokio::join!(forward(0), forward(1)) });
        let shown = read.join().expect("no panic").expect("as many bytes");
        for line in shown.chunks(9) {
            let digits = &line[3..8];
            assert!(line.ends_with(b"\n") && digits.iter().all(u8::is_ascii_digit), "{line:?}");
        }
    }

    #[test]
    fn of_a_long_line_the_end_is_kept() {
        let end = text(&pumped(&("x".repeat(200_000) + " the cause")));
        assert!(end.ends_with("x the cause") && end.len() == BYTES_KEPT, "{}", end.len());
    }
}
