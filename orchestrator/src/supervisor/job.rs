//! The part of a job that this node launches.

use std::env::consts::ARCH;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ryzanstein_config::{Config, file};
use ryzanstein_process_group::Rank;

/// Maximum number of bytes that the system reads of a script's first line.
const LONGEST_FIRST_LINE: u64 = 256;

/// The folders that the system searches if there is no variable `PATH`.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// The reason why a job could not be launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The user's request is impossible.
    #[error("{0}")]
    Configuration(String),
    /// The rendezvous cannot listen at its address. The message names the setting to change.
    #[error("{message}")]
    Listen {
        /// The whole sentence, from [`listen::explain`](crate::rendezvous::listen::explain).
        message: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// The operating system refused an action on this node.
    #[error("{what}: {source}")]
    System {
        /// The action that failed.
        what: String,
        /// The operating system's error.
        source: io::Error,
    },
}

impl LaunchError {
    /// Returns a function for `map_err`; `what` is the action that failed.
    pub(super) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::System { what, source: source.into() }
    }

    /// Returns true if launching again with the same flags and settings would fail again.
    pub const fn is_permanent(&self) -> bool {
        matches!(self, Self::Configuration(_))
    }

    /// Returns the error of a user who did not give the number of ranks.
    pub fn no_world_size() -> Self {
        Self::Configuration("world size is not set: pass --world-size N or set job.world_size".into())
    }
}

/// The form in which the output of ranks is passed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RankOutput {
    /// Line by line, with the prefix `[rank R]`, which is coloured on the streams set to true.
    Prefixed {
        /// True for colours on standard output.
        stdout: bool,
        /// True for colours on standard error.
        stderr: bool,
    },
    /// Rank 0 writes to this process's standard output itself, and to its standard error where that is a terminal. With a log
    /// folder, its output passes through this process, unchanged. For commands that launch themselves, in which the other
    /// ranks print nothing but errors.
    Direct,
}

/// One node's part of a job.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program that every rank runs.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Environment variables of the ranks, in addition to those of the launcher.
    pub environment: Vec<(String, OsString)>,
    /// The file with the job's secret; a job on several nodes needs one. `None` makes a fresh secret.
    pub secret_file: Option<PathBuf>,
    /// The folder of the socket on which `ryz status` finds the job, from [`status::folder`](crate::status::folder()). `None`
    /// serves none.
    pub status_folder: Option<PathBuf>,
    /// The form in which the ranks' output reaches that of this process.
    pub output: RankOutput,
    /// The configuration. `job.world_size` must be set.
    pub config: Config,
}

impl Job {
    pub(super) fn world_size(&self) -> Result<u32, LaunchError> {
        Ok(self.config.job.world_size.ok_or_else(LaunchError::no_world_size)?.get())
    }

    /// Returns the ranks that run on this node. Ranks are spread evenly; if they do not divide evenly, the first nodes take one
    /// more each.
    pub(super) fn ranks(&self) -> Result<Range<u32>, LaunchError> {
        let (ranks, nodes) = (self.world_size()?, self.config.launch.nnodes.get());
        if ranks < nodes {
            return Err(LaunchError::Configuration(format!(
                "{ranks} ranks cannot be spread over {nodes} nodes: every node needs at least one"
            )));
        }
        let node = self.config.launch.node_rank;
        let first = |node: u32| node * (ranks / nodes) + node.min(ranks % nodes);
        Ok(first(node)..first(node + 1))
    }

    pub(super) fn log_folder(&self, rank: Rank) -> Option<PathBuf> {
        self.config.launch.log_dir.as_ref().map(|folder| folder.join(format!("rank-{rank}")))
    }
}

/// Finds a program as the system would in the folders of `search_path`, the variable `PATH`, before anything is started.
///
/// # Errors
/// [`LaunchError::Configuration`] if it does not exist or cannot be executed.
pub fn check_program(name: &Path, search_path: Option<&OsStr>) -> Result<(), LaunchError> {
    let executable = |path: &Path| {
        std::fs::metadata(path)
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    let shown = name.display();
    let refuse = |why: String| {
        let is_script = name.extension().is_some_and(|extension| extension == "py");
        let hint =
            if is_script { format!("; to run it with Python: python3 {shown}") } else { String::new() };
        Err(LaunchError::Configuration(why + &hint))
    };
    if name.components().count() > 1 {
        return match std::fs::metadata(name) {
            Err(error) => refuse(format!(
                "the program `{shown}` cannot be run: {error}; check the path; relative paths start in the current folder"
            )),
            Ok(metadata) if metadata.is_dir() => {
                refuse(format!("the program `{shown}` is a folder; name a program in it"))
            }
            Ok(_) if !executable(name) => refuse(format!(
                "the program `{shown}` is not executable; `chmod +x {shown}`, or name its interpreter first"
            )),
            Ok(_) => check_content(name),
        };
    }
    let folders = std::env::split_paths(search_path.unwrap_or(DEFAULT_PATH.as_ref()));
    if let Some(program) = folders.map(|folder| folder.join(name)).find(|program| executable(program)) {
        return check_content(&program);
    }
    if executable(name) {
        return refuse(format!(
            "the program `{shown}` is not on the PATH; for the one in this folder, write `./{shown}`"
        ));
    }
    refuse(format!("the program `{shown}` is not on the PATH; check the spelling, or give its full path"))
}

/// Refuses a file that the system cannot execute. It would run most of them as shell scripts instead, and its error for a script
/// without its interpreter names the script.
fn check_content(program: &Path) -> Result<(), LaunchError> {
    let mut start = Vec::new();
    // A program that may be run but not read is no script.
    let Ok(opened) = std::fs::File::open(program) else { return Ok(()) };
    if opened.take(LONGEST_FIRST_LINE).read_to_end(&mut start).is_err() {
        return Ok(());
    }
    let shown = program.display();
    let line = start.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let why = if let Some(line) = line.strip_prefix(b"#!") {
        missing_interpreter(line, program)
    } else if let Err(pointer) = file::check_fetched(&start) {
        Some(pointer.to_string())
    } else if start.is_empty() {
        Some("it is empty; build it, or copy it again".into())
    } else if program.extension().is_some_and(|extension| extension == "py") {
        Some(format!(
            "it does not begin with `#!`, so that a shell would run it; to run it with Python: python3 {shown}"
        ))
    } else if may_emulate() {
        None
    } else if start.starts_with(b"\x7fELF") {
        other_processor(&start)
    } else if line.contains(&0) {
        Some("Exec format error: it is neither a program for this system nor a script".into())
    } else {
        None
    };
    why.map_or(Ok(()), |why| {
        Err(LaunchError::Configuration(format!("the program `{shown}` cannot be run: {why}")))
    })
}

/// Returns why the interpreter cannot be run that a script's first line names after `#!`.
fn missing_interpreter(line: &[u8], script: &Path) -> Option<String> {
    let line = String::from_utf8_lossy(line);
    let named = line.trim_start_matches([' ', '\t']).split([' ', '\t']).next().unwrap_or_default();
    if named.is_empty() || Path::new(named).exists() {
        return None;
    }
    Some(match named.strip_suffix('\r') {
        Some(named) => format!(
            "its first line, which names the interpreter `{named}`, ends in CR LF; convert it: sed -i 's/\\r$//' {}",
            script.display()
        ),
        None => format!(
            "its first line names the interpreter `{named}`, which does not exist; install it, or correct the line"
        ),
    })
}

/// Returns true if the system shows emulators of programs for other systems (binfmt_misc). Where the folder is not mounted, it is
/// empty: without an emulator, a shell would run such a program.
fn may_emulate() -> bool {
    // Two files belong to the mechanism itself.
    std::fs::read_dir("/proc/sys/fs/binfmt_misc").is_ok_and(|files| files.count() > 2)
}

/// Returns why this processor cannot execute an ELF file.
fn other_processor(elf: &[u8]) -> Option<String> {
    const NAMES: [(u16, &str); 6] =
        [(3, "i386"), (21, "ppc64"), (40, "arm"), (62, "x86_64"), (183, "aarch64"), (243, "riscv")];
    // These also execute programs of 32 bits.
    let executed = match ARCH {
        "x86_64" => [62, 3],
        "aarch64" => [183, 40],
        _ => return None,
    };
    let [_, _, _, _, _, order, .., first, second] = *elf.first_chunk::<20>()?;
    let machine = [first, second];
    let machine = if order == 1 { u16::from_le_bytes(machine) } else { u16::from_be_bytes(machine) };
    let name = NAMES.iter().find(|(number, _)| *number == machine);
    let name = name.map_or_else(|| format!("number {machine}"), |(_, name)| (*name).to_owned());
    (!executed.contains(&machine)).then(|| {
        format!(
            "Exec format error: it is for the processor {name}, and this is {ARCH}; build it for this one"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn a_file_that_the_system_cannot_execute_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let cases: [(&str, &[u8], Option<&str>); 15] = [
            (
                "script",
                b"#!/no/such/python3 -u\nprint(1)\n",
                Some("interpreter `/no/such/python3`, which does not exist; install it"),
            ),
            ("script", b"#! /no/such/python3\n", Some("interpreter `/no/such/python3`")),
            ("script", b"#!/bin/sh\r\necho\r\n", Some("ends in CR LF; convert it: sed -i 's/\\r$//' ")),
            ("script", b"#!/bin/sh -e\n", None),
            ("script", b"#!", None),
            ("script", b"echo hello\n", None),
            ("program", b"", Some("it is empty")),
            ("program", b"\x7fELF", None),
            (
                "program",
                b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xf3\0",
                Some("Exec format error: it is for the processor riscv, and this is "),
            ),
            (
                "program",
                b"\x7fELF\x02\x02\x01\0\0\0\0\0\0\0\0\0\0\x02\0\x15",
                Some("Exec format error: it is for the processor ppc64, and this is "),
            ),
            ("program.exe", b"MZ\x90\0\x03\0", Some("Exec format error: it is neither a program")),
            ("program", b"\xcf\xfa\xed\xfe\x07\0\0\x01", Some("Exec format error: it is neither a program")),
            (
                "program",
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                Some("a Git LFS pointer, not the file itself: run `git lfs pull`"),
            ),
            (
                "train.py",
                b"import os\n",
                Some("does not begin with `#!`, so that a shell would run it; to run it"),
            ),
            ("train.py", b"#!/usr/bin/env python3\n", None),
        ];
        for (name, text, expected) in cases {
            let expected = expected.filter(|words| !words.starts_with("Exec format error") || !may_emulate());
            let program = folder.path().join(name);
            std::fs::write(&program, text).expect("written");
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))
                .expect("made executable");
            let path = [&b"caf\xe9:"[..], folder.path().as_os_str().as_bytes()].concat();
            let path = Some(OsStr::from_bytes(&path));
            for outcome in [check_program(&program, None), check_program(name.as_ref(), path)] {
                match expected {
                    None => outcome.expect("nothing is wrong"),
                    Some(expected) => {
                        let error = outcome.expect_err("refused").to_string();
                        assert!(error.contains(expected), "{error}");
                    }
                }
            }
        }
    }

    #[test]
    fn without_a_search_path_a_program_is_found_where_the_system_finds_it() {
        check_program("sh".as_ref(), None).expect("it is in /bin");
        check_program("no-such-program-anywhere".as_ref(), None).expect_err("it is nowhere");
        check_program("sh".as_ref(), Some("/no/such/folder".as_ref())).expect_err("it is elsewhere");
    }

    fn job(ranks: u32, nodes: u32, node: u32) -> Job {
        let mut config = Config::default();
        config.job.world_size = ryzanstein_config::WorldSize::new(ranks).ok();
        config.launch.nnodes = std::num::NonZeroU32::new(nodes).expect("not zero");
        config.launch.node_rank = node;
        Job {
            program: "x".into(),
            arguments: vec![],
            environment: vec![],
            secret_file: None,
            status_folder: None,
            output: RankOutput::Prefixed { stdout: false, stderr: false },
            config,
        }
    }

    #[test]
    fn ranks_are_spread_over_nodes_without_gap_or_overlap() {
        for (ranks, nodes) in [(4, 1), (4, 2), (7, 3), (3, 3)] {
            let mut next = 0;
            for node in 0..nodes {
                let range = job(ranks, nodes, node).ranks().expect("a range");
                assert_eq!(range.start, next);
                assert!(!range.is_empty());
                next = range.end;
            }
            assert_eq!(next, ranks);
        }
        assert!(job(2, 3, 0).ranks().is_err());
    }
}
