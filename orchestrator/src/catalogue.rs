//! Known errors: the meaning of a message and its remedy, for `ryz explain`, for the end of a command that failed, and for the
//! launcher's closing report.
//!
//! The entries and what finds them are in [`ryzanstein_process_group::catalogue`].

use std::fmt::Write as _;
use std::io::{self, BufRead, Read as _};
use std::num::NonZeroUsize;

use serde::Serialize;
use serde_json::{Value, json};

pub use ryzanstein_process_group::catalogue::{
    Entry, Line, LineExplainer, Section, find, sections, telling_lines, without_colors,
};

use crate::table::{self, Cell, Column, Screen, Tone, wrap};

/// Returns all entries.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    sections().iter().flat_map(|section| &section.entries)
}

/// Text to add to an error's message where it is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Explanation {
    /// Id of the entry.
    pub id: &'static str,
    /// The cause.
    pub cause: &'static str,
    /// The remedy; `None` if the message states it.
    pub remedy: Option<&'static str>,
}

/// Explains an error's message by the entry that explains most; `None` if it is unknown, or explains itself.
pub fn explain(message: &str) -> Option<Explanation> {
    let message = without_colors(message);
    let lines: Vec<&str> = message.lines().filter(|line| !is_remark(line)).collect();
    // Lines before an exception, such as one about a connection that a library retried, do not explain it.
    let first = lines.iter().rposition(|line| is_of_program(line)).unwrap_or(0);
    let entry = find(&lines[first..].join("\n")).filter(|entry| !entry.is_plain)?;
    let remedy = Some(&*entry.remedy).filter(|remedy| !message.contains(remedy));
    Some(Explanation { id: &entry.id, cause: &entry.cause, remedy })
}

/// Returns true for a line of NCCL or PyTorch that tells of no failure, such as a network that this host does not have.
fn is_remark(line: &str) -> bool {
    let is_warning = |rest: &str| rest.starts_with(|c: char| c == ' ' || c.is_ascii_digit());
    line.contains("NCCL INFO") || line.split("[W").skip(1).any(is_warning)
}

/// Returns true for an exception of Python that its own line explains, or nothing does.
fn is_of_program(line: &str) -> bool {
    const KINDS: [&str; 4] = ["Error", "Exception", "Exit", "Interrupt"];
    /// These, and some of RuntimeError, only say that something else failed, which lines above tell.
    const ECHOES: [&str; 4] =
        ["DistBackendError", "ChildFailedError", "CalledProcessError", "EngineDeadError"];
    let Some(name) = line.split(": ").find(|part| !part.starts_with('[')) else { return false };
    let name = name.trim_end().trim_end_matches(':');
    let class = name.rsplit('.').next().unwrap_or(name);
    // C and other languages say `Error: `.
    let is_exception = name != "Error"
        && name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '.')
        && class.starts_with(|c: char| c.is_uppercase() || c == '_')
        && KINDS.iter().any(|kind| class.ends_with(*kind));
    let lower = line.to_ascii_lowercase();
    let is_of_library = ["nccl", "gloo", "engine core"].iter().any(|library| lower.contains(library));
    is_exception && !ECHOES.contains(&class) && !(class == "RuntimeError" && is_of_library)
}

/// Returns true if the last error of a text says that another process is the origin of its failure.
pub(crate) fn is_echo(text: &str) -> bool {
    let lines = telling_lines(text.lines(), LINES);
    let is_error =
        |line: &str| ["error", "exception"].iter().any(|word| line.to_ascii_lowercase().contains(word));
    let last = lines.iter().rev().find_map(|line| match find(line) {
        Some(entry) => Some(entry.is_echo),
        None => is_error(line).then_some(false),
    });
    last.unwrap_or(false)
}

/// Maximum number of lines that are shown of a program's output.
const LINES: NonZeroUsize = NonZeroUsize::new(12).expect("not zero");

/// Returns the lines at the end of a program's output that tell most of its failure, without `error: ` in front. Of a line that was
/// overwritten, such as a progress bar, the last text counts; of a long line, the end.
pub(crate) fn telling(output: &str) -> String {
    /// Maximum number of bytes of a line.
    const BYTES: usize = 1 << 10;
    let shown = |line: &'_ str| -> String {
        let line = line.trim_end();
        let line = line.rsplit('\r').next().unwrap_or(line);
        line[line.ceil_char_boundary(line.len().saturating_sub(BYTES))..].to_owned()
    };
    let lines: Vec<String> = output.lines().map(shown).collect();
    let text = telling_lines(lines.iter().map(String::as_str), LINES).join("\n");
    text.strip_prefix("error: ").map(str::to_owned).unwrap_or(text)
}

impl Explanation {
    /// Formats lines below an error, each indented: the cause after `label`, and the remedy.
    pub fn lines(&self, label: &str, screen: Screen) -> String {
        let mut lines = String::new();
        for (label, text) in [(label, Some(self.cause)), ("remedy", self.remedy)] {
            if let Some(text) = text {
                let _ = writeln!(lines, "{}", wrap(&format!("  {label}: {text}"), 4, screen));
            }
        }
        lines
    }
}

/// An error that was found in a text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The entry that explains the error.
    pub entry: &'static Entry,
    /// Number of its first line, from 1.
    pub line: usize,
    /// Its first line.
    pub text: String,
    /// Number of lines with the error.
    pub count: usize,
}

/// Finds the errors of a text, such as a whole log, each once, in the order of their first lines. Stack traces are ignored.
///
/// # Errors
/// Returns an error if the text cannot be read.
pub fn scan(mut text: impl BufRead) -> io::Result<Vec<Found>> {
    /// Maximum number of bytes of a line that are in memory at once. The rest is read as if it were another line.
    const LONGEST: u64 = 1 << 20;
    let mut explainer = LineExplainer::default();
    let mut all: Vec<Found> = Vec::new();
    let (mut line, mut bytes) = (1, Vec::new());
    while text.by_ref().take(LONGEST).read_until(b'\n', &mut bytes)? > 0 {
        let words = String::from_utf8_lossy(&bytes);
        let words = words.trim_end_matches(['\n', '\r']);
        // A remark is an error only to an entry about remarks.
        if let Line::Known { entry, .. } = explainer.explain(words)
            && (!is_remark(&without_colors(words)) || is_remark(&entry.sample))
        {
            if let Some(found) = all.iter_mut().find(|found| found.entry.id == entry.id) {
                found.count += 1;
            } else {
                let text = without_colors(words).trim().to_owned();
                all.push(Found { entry, line, text, count: 1 });
            }
        }
        line += usize::from(bytes.ends_with(b"\n"));
        bytes.clear();
    }
    Ok(all)
}

/// Formats the errors found, for people.
pub fn found_table(all: &[Found], screen: Screen) -> String {
    /// Maximum number of characters shown of a line.
    const LONGEST: usize = 400;
    let mut out = String::new();
    for found in all {
        let Found { entry, line, text, count } = found;
        let times = if *count == 1 { String::new() } else { format!(", in {count} lines") };
        let _ = writeln!(out, "{} (line {line}{times})", screen.paint(Tone::Strong, &entry.id));
        let _ = writeln!(out, "  {}", wrap(&table::cut(text, LONGEST), 2, screen));
        for (label, text) in [("cause", &entry.cause), ("remedy", &entry.remedy)] {
            let _ = writeln!(out, "{}", wrap(&format!("  {label}: {text}"), 4, screen));
        }
        if let Some(address) = &entry.source {
            let _ = writeln!(out, "  source: {address}");
        }
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out + "\n"
}

/// Returns the errors found, for programs.
pub fn found_json(all: &[Found]) -> Value {
    let found = all.iter().map(|found| {
        json!({
            "id": found.entry.id, "line": found.line, "count": found.count, "text": found.text,
            "cause": found.entry.cause, "remedy": found.entry.remedy, "source": found.entry.source,
        })
    });
    json!({ "found": found.collect::<Vec<_>>() })
}

/// Formats all entries, for people.
pub fn list_table(screen: Screen) -> String {
    let rows: Vec<Vec<Cell>> = sections()
        .iter()
        .flat_map(|section| {
            let cells = |entry: &'static Entry| [&section.title, &entry.id, &entry.sample];
            section.entries.iter().map(move |entry| cells(entry).map(|text| (&**text).into()).into())
        })
        .collect();
    table::table(
        &[Column::left("about").drop_priority(1), Column::left("id"), Column::left("sample")],
        &rows,
        screen,
    )
}

/// Returns all entries, for programs.
pub fn list_json() -> Value {
    let entries = sections().iter().flat_map(|section| {
        section.entries.iter().map(|entry| {
            json!({
                "id": entry.id, "about": section.title, "patterns": entry.patterns, "sample": entry.sample,
                "cause": entry.cause, "remedy": entry.remedy, "source": entry.source,
            })
        })
    });
    json!({ "entries": entries.collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    #[test]
    fn an_exception_is_not_explained_by_what_a_library_wrote_before() {
        const RETRIED: &str = "[c10d] The client socket has timed out after 3000ms while trying to connect to (127.0.0.1, 46423).";
        const WARNED: &str = "[rank0]:[W1017 10:00:00.1 socket.cpp:663] [c10d] The client socket has failed to connect to [::1]:29500";
        const NO_NIC: &str = "n0:1:1 [0] NCCL INFO NET/IB : No device found.";
        const NO_PEER_ACCESS: &str =
            "n0:1:1 [0] NCCL WARN Could not enable P2P between dev 0(=5000) and dev 1(=8000)";
        const SHM: &str = "n0:1:1 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-x to 4194660 bytes";
        let cases = [
            (RETRIED, "", Some("torch-store-unreachable")),
            (RETRIED, "[rank2]: ValueError: bad batch", None),
            (RETRIED, "RuntimeError: Error(s) in loading state_dict for Llama: size mismatch", None),
            (RETRIED, "AssertionError", None),
            (RETRIED, "huggingface_hub.errors.LocalEntryNotFoundError: no such file", None),
            (RETRIED, "ModuleNotFoundError: No module named 'flash_attn'\ncleaning up", None),
            (RETRIED, "KeyboardInterrupt", None),
            (NO_PEER_ACCESS, "torch.OutOfMemoryError: CUDA out of memory.", Some("gpu-memory-full")),
            (
                NO_PEER_ACCESS,
                "\x1b[1mtorch.OutOfMemoryError\x1b[0m: CUDA out of memory.",
                Some("gpu-memory-full"),
            ),
            (NO_PEER_ACCESS, "OSError: [Errno 28] No space left on device", Some("disk-full")),
            (SHM, "RuntimeError: NCCL communicator was aborted on rank 0.", Some("shared-memory-too-small")),
            (
                SHM,
                "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268\nncclSystemError: System call failed.",
                Some("shared-memory-too-small"),
            ),
            (
                "torch.OutOfMemoryError: CUDA out of memory.",
                "RuntimeError: Engine core initialization failed. See root cause above.",
                Some("gpu-memory-full"),
            ),
            (
                NO_NIC,
                "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268",
                Some("torch-nccl-failed"),
            ),
            (NO_NIC, "", None),
            (WARNED, "exit status 1", None),
        ];
        for (before, last, expected) in cases {
            let explanation = explain(&format!("{before}\n{last}"));
            assert_eq!(explanation.map(|it| it.id), expected, "{before}\n{last}");
        }
    }

    #[test]
    fn a_remedy_that_the_message_has_is_not_said_again() {
        let error = ryzanstein_process_group::device::NcclError {
            call: "ncclCommInitRank",
            code: 2,
            text: "unhandled system error".into(),
            last: "Error: failed to extend /dev/shm/nccl-x to 4 bytes".into(),
        };
        let explanation = explain(&error.to_string()).expect("known");
        assert_eq!((explanation.id, explanation.remedy), ("shared-memory-too-small", None));
        let explanation =
            explain("NCCL WARN Error: failed to extend /dev/shm/nccl-x to 4 bytes").expect("known");
        assert!(explanation.remedy.is_some_and(|remedy| remedy.contains("--shm-size")));
    }

    #[test]
    fn only_the_last_error_makes_a_text_an_echo() {
        let lost =
            "RuntimeError: [../gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:28048";
        assert!(is_echo(lost) && is_echo(&format!("{lost}\ncleaning up")));
        assert!(!is_echo(&format!("{lost}, retrying\nValueError: no such file")));
        assert!(!is_echo("loading") && !is_echo(""));
    }

    #[test]
    fn the_telling_lines_are_those_that_were_last_seen() {
        let output = "starting\n\rstep 1\rstep 2\n\nerror: no space\r\n";
        assert_eq!(telling(output), "starting\nstep 2\nerror: no space");
        assert_eq!(telling("error: no space\n"), "no space");
        let long = format!("{}é the cause", "x".repeat(5000));
        assert!(telling(&long).ends_with("é the cause") && telling(&long).len() <= 1 << 10);
    }

    #[test]
    fn a_message_that_explains_itself_gets_no_more_words() {
        assert_eq!(explain("unknown setting: environment variable `RYZ_X`; did you mean `RYZ_Y`?"), None);
    }

    #[test]
    fn an_error_behind_lines_of_any_length_has_the_right_number() {
        let error = b"\nConnection refused (os error 111)\n";
        let log =
            io::repeat(b'x').take((3 << 20) + 5).chain(io::repeat(b'\n').take(1 << 20)).chain(&error[..]);
        let found = scan(BufReader::new(log)).expect("memory");
        assert_eq!(found.iter().map(|found| found.line).collect::<Vec<_>>(), [(1 << 20) + 2]);
    }

    #[test]
    fn a_log_is_explained_once_for_each_error_in_the_order_of_its_lines() {
        let log = "starting\n\
                   [rank 1] NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000\n\
                   [rank 0] NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000\n\
                   n:1:1 [0] NCCL INFO Call to connect returned Connection refused, retrying\n\
                   n:1:1 [0] NCCL INFO NET/Plugin : libnccl-net.so: cannot open shared object file: No such file or directory\n\
                   [W socket.cpp:601] [c10d] The client socket has failed to connect to [n0]:29500 (errno: 97).\n\
                   [rank 0] ncclInvalidUsage: This usually reflects invalid usage of NCCL library.";
        let all = scan(log.as_bytes()).expect("memory");
        let found: Vec<_> = all.iter().map(|found| (&*found.entry.id, found.line, found.count)).collect();
        assert_eq!(found, [("nccl-duplicate-gpu", 2, 2), ("nccl-invalid-call", 7, 1)]);
        let text = found_table(&all, Screen::PLAIN);
        assert!(text.starts_with("nccl-duplicate-gpu (line 2, in 2 lines)\n  [rank 1] NCCL WARN"), "{text}");
        assert!(
            text.contains("\n  remedy: start one rank a GPU") && text.contains("\n  source: https://"),
            "{text}"
        );
        let json = found_json(&all);
        assert_eq!(
            (&json["found"][0]["line"], &json["found"][1]["id"]),
            (&2.into(), &"nccl-invalid-call".into())
        );
    }
}
