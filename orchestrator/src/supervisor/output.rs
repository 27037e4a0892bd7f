//! The output of ranks: forwarded line by line with a prefix, written to log files, and its last lines remembered.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ryzanstein_process_group::Rank;

/// Longer lines are split.
const LONGEST_LINE: usize = 64 << 10;
/// Number of last lines remembered.
const LINES_KEPT: usize = 12;
/// Bytes remembered of each of them.
const BYTES_KEPT: usize = 1 << 10;

/// Where a rank's lines go, and what is put before each.
#[derive(Clone, Debug)]
pub(super) enum Sink {
    Stdout(String),
    Stderr(String),
}

/// What marks the lines of a rank; with colours, neighbouring ranks have different ones.
pub(super) fn prefix(rank: Rank, color: bool) -> String {
    const COLORS: [u8; 6] = [36, 35, 34, 32, 33, 31];
    let code = COLORS[rank.index() % COLORS.len()];
    if color { format!("\x1b[{code}m[rank {rank}]\x1b[0m ") } else { format!("[rank {rank}] ") }
}

/// The last lines of a stream.
pub(super) type Tail = Arc<Mutex<VecDeque<String>>>;

/// Copies a rank's standard output to ours and to its log, byte by byte, on a thread of its own.
pub(super) fn tee(
    rank: Rank,
    mut stream: impl Read + Send + 'static,
    log: File,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("ryz-output-{rank}")).spawn(move || {
        let (mut log, mut buffer) = (Some(log), vec![0; LONGEST_LINE]);
        loop {
            let bytes = match stream.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => &buffer[..count],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            // As in `pump`: neither a full disk nor a reader that has left ends the job.
            log.take_if(|log| log.write_all(bytes).is_err());
            let _ = write_line(&mut io::stdout().lock(), bytes);
        }
    })
}

/// Reads a rank's stream to its end on a thread of its own: a slow reader of our output must not block the supervisor.
pub(super) fn forward(
    rank: Rank,
    stream: impl Read + Send + 'static,
    to: Sink,
    log: Option<File>,
) -> io::Result<(Tail, JoinHandle<()>)> {
    let tail = Tail::default();
    let remembered = Arc::clone(&tail);
    let thread = std::thread::Builder::new().name(format!("ryz-output-{rank}")).spawn(move || {
        pump(BufReader::new(stream), &to, log, &remembered);
    })?;
    Ok((tail, thread))
}

fn pump(mut stream: impl BufRead, to: &Sink, mut log: Option<File>, tail: &Tail) {
    let (Sink::Stdout(prefix) | Sink::Stderr(prefix)) = to;
    loop {
        let mut line = prefix.clone().into_bytes();
        match stream.by_ref().take(LONGEST_LINE as u64).read_until(b'\n', &mut line) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        }
        if let Some(file) = &mut log
            && file.write_all(&line[prefix.len()..]).is_err()
        {
            // A full disk must not end the job. The lines are still forwarded.
            log = None;
        }
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        // One write per line, so that lines of different ranks never mix. If nobody reads our output any more, the rank's
        // lines are still drained, or it would block.
        let _ = match to {
            Sink::Stdout(_) => write_line(&mut io::stdout().lock(), &line),
            Sink::Stderr(_) => write_line(&mut io::stderr().lock(), &line),
        };
        remember(tail, &line[prefix.len()..]);
    }
}

fn write_line(out: &mut impl Write, line: &[u8]) -> io::Result<()> {
    out.write_all(line)?;
    out.flush()
}

fn remember(tail: &Tail, line: &[u8]) {
    let line = String::from_utf8_lossy(&line[..line.len().min(BYTES_KEPT)]).trim_end().to_owned();
    if line.is_empty() {
        return;
    }
    let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
    if tail.len() == LINES_KEPT {
        tail.pop_front();
    }
    tail.push_back(line);
}

/// The remembered lines as one text.
pub(super) fn text(tail: &Tail) -> String {
    let tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
    tail.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
}

/// Waits until the streams have been read to their end. Their writers are dead by now, so this takes no time unless the
/// launcher's own output is blocked.
pub(super) fn drain(threads: Vec<JoinHandle<()>>, patience: Duration) {
    let deadline = Instant::now() + patience;
    for thread in threads {
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_remembered_and_long_ones_cut() {
        let tail = Tail::default();
        let text_in: String =
            (0..20).map(|i| format!("line {i}\n")).collect::<Vec<_>>().concat() + &"x".repeat(200_000);
        pump(text_in.as_bytes(), &Sink::Stderr(prefix(Rank(0), false)), None, &tail);
        let lines = tail.lock().expect("not poisoned");
        assert_eq!(lines.len(), LINES_KEPT);
        assert!(lines.iter().all(|line| line.len() <= BYTES_KEPT));
        assert_eq!(lines[0], "line 12");
    }
}
