//! The output of ranks: forwarded line by line with a prefix, written to log files, and with its last lines kept.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ryzanstein_process_group::Rank;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::console::{self, Stream};

/// Maximum length of a line; longer lines are split.
const LONGEST_LINE: usize = 64 << 10;
/// Number of last lines that are kept.
const LINES_KEPT: usize = 12;
/// Number of bytes that are kept of each of them.
const BYTES_KEPT: usize = 1 << 10;

/// The destination of a rank's lines.
#[derive(Clone, Debug)]
pub(super) struct Sink {
    pub(super) stream: Stream,
    /// Prefix of each line.
    pub(super) prefix: String,
}

/// Returns the prefix of the lines of a rank; with colours, neighbouring ranks have different ones.
pub(super) fn prefix(rank: Rank, color: bool) -> String {
    const COLORS: [u8; 6] = [36, 35, 34, 32, 33, 31];
    let code = COLORS[rank.index() % COLORS.len()];
    if color { format!("\x1b[{code}m[rank {rank}]\x1b[0m ") } else { format!("[rank {rank}] ") }
}

/// The last lines of a stream.
pub(super) type Tail = Arc<Mutex<VecDeque<String>>>;

/// The log file of one stream of a rank.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) rank: Rank,
    pub(super) path: PathBuf,
    pub(super) file: File,
}

/// The thread that reads the output of all ranks. A thread for each stream would make every fork copy its mappings.
#[derive(Debug)]
pub(super) struct Output {
    runtime: Handle,
    unwritten: Arc<Mutex<Vec<String>>>,
}

impl Output {
    pub(super) fn start() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        std::thread::Builder::new()
            .name("ryz-output".into())
            .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
        Ok(Self { runtime: handle, unwritten: Arc::default() })
    }

    /// Copies a rank's standard output to ours and to its log, byte by byte.
    pub(super) fn tee(&self, stream: OwnedFd, log: Log) -> io::Result<JoinHandle<()>> {
        let mut stream = self.receiver(stream)?;
        let mut log = self.logger(Some(log));
        Ok(self.runtime.spawn(async move {
            let mut buffer = vec![0; LONGEST_LINE];
            while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                log.write(&buffer[..count]);
                console::stdout().write(&buffer[..count]).await;
            }
        }))
    }

    /// Reads a rank's stream to its end.
    pub(super) fn forward(
        &self,
        stream: OwnedFd,
        to: Sink,
        log: Option<Log>,
    ) -> io::Result<(Tail, JoinHandle<()>)> {
        let (stream, log) = (self.receiver(stream)?, self.logger(log));
        let tail = Tail::default();
        let reader = self.runtime.spawn(pump(stream, to, log, Arc::clone(&tail)));
        Ok((tail, reader))
    }

    /// Returns the logs that could not be written to their end, and the reasons.
    pub(super) fn unwritten(&self) -> Vec<String> {
        locked(&self.unwritten).clone()
    }

    fn receiver(&self, stream: OwnedFd) -> io::Result<pipe::Receiver> {
        // A tokio pipe belongs to the runtime in whose context it is created.
        let _context = self.runtime.enter();
        pipe::Receiver::from_owned_fd(stream)
    }

    fn logger(&self, log: Option<Log>) -> Logger {
        Logger { log, unwritten: Arc::clone(&self.unwritten) }
    }
}

/// Writes a log as long as that works.
struct Logger {
    log: Option<Log>,
    unwritten: Arc<Mutex<Vec<String>>>,
}

impl Logger {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(Log { rank, path, file }) = &mut self.log
            && let Err(error) = file.write_all(bytes)
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

async fn pump(stream: impl AsyncRead + Unpin, to: Sink, mut log: Logger, tail: Tail) {
    let Sink { stream: out, prefix } = to;
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend_from_slice(prefix.as_bytes());
        let read = (&mut stream).take(LONGEST_LINE as u64).read_until(b'\n', &mut line).await;
        let Ok(1..) = read else { return };
        log.write(&line[prefix.len()..]);
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        remember(&tail, &line[prefix.len()..]);
        // Whole lines, so that lines of different ranks never mix.
        out.write(&line).await;
    }
}

fn remember(tail: &Tail, line: &[u8]) {
    let line = String::from_utf8_lossy(&line[..line.len().min(BYTES_KEPT)]).trim_end().to_owned();
    if line.is_empty() {
        return;
    }
    let mut tail = locked(tail);
    if tail.len() == LINES_KEPT {
        tail.pop_front();
    }
    tail.push_back(line);
}

/// Returns the kept lines as one text.
pub(super) fn text(tail: &Tail) -> String {
    locked(tail).iter().map(String::as_str).collect::<Vec<_>>().join("\n")
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until the streams have been read to their end. Their writers are dead by now, so this takes no time unless the
/// launcher's own output is blocked.
pub(super) fn drain(readers: &[JoinHandle<()>], patience: Duration) {
    console::wait(patience, || readers.iter().all(JoinHandle::is_finished));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_remembered_and_long_ones_cut() {
        let tail = Tail::default();
        let text_in: String =
            (0..20).map(|i| format!("line {i}\n")).collect::<Vec<_>>().concat() + &"x".repeat(200_000);
        let nowhere = File::options().write(true).open("/dev/null").expect("opened");
        let to = Sink { stream: Stream::start("test", nowhere), prefix: prefix(Rank(0), false) };
        let log = Logger { log: None, unwritten: Arc::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(pump(text_in.as_bytes(), to, log, Arc::clone(&tail)));
        let lines = tail.lock().expect("not poisoned");
        assert_eq!(lines.len(), LINES_KEPT);
        assert!(lines.iter().all(|line| line.len() <= BYTES_KEPT));
        assert_eq!(lines[0], "line 12");
    }
}
