//! Finds and kills every descendant of this process.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, wait};

/// Timeout for killed processes to disappear. Those in an uninterruptible wait are reported.
const PATIENCE: Duration = Duration::from_secs(2);

/// One process, as described in /proc.
#[derive(Clone, Debug)]
struct Process {
    pid: i32,
    parent: i32,
    state: char,
    name: String,
}

/// Returns all living descendants of this process, nearest first. Orphans count while this process is the subreaper.
fn living() -> Vec<Process> {
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(process) =
            std::fs::read(entry.path().join("stat")).ok().and_then(|stat| parse(pid, &stat))
        {
            children.entry(process.parent).or_default().push(process);
        }
    }
    let mut found = children.remove(&getpid().as_raw_nonzero().get()).unwrap_or_default();
    let mut next = 0;
    while let Some(pid) = found.get(next).map(|process| process.pid) {
        found.extend(children.remove(&pid).unwrap_or_default());
        next += 1;
    }
    found.retain(|process| !matches!(process.state, 'Z' | 'X'));
    found
}

/// Parses `pid (name) state ppid …`, where the name may contain anything, parentheses and spaces included.
fn parse(pid: i32, stat: &[u8]) -> Option<Process> {
    let stat = String::from_utf8_lossy(stat);
    let (head, tail) = stat.rsplit_once(')')?;
    let mut fields = tail.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    Some(Process { pid, parent, state, name: head.split_once('(')?.1.to_owned() })
}

/// Returns the kernel's letter for the state of a rank's program. It is `T` also if the process only waits for it, as with
/// `sh -c PROGRAM`, and the program is stopped.
pub(super) fn program_state(pid: u32) -> Option<char> {
    let own = state(pid)?;
    let waits_for = || only_child(pid).and_then(state).filter(|state| matches!(state, 'T' | 't'));
    (own == 'S').then(waits_for).flatten().or(Some(own))
}

/// Returns the child of a process that has exactly one; of its first thread, which is the only one of a shell.
fn only_child(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let mut children = children.split_ascii_whitespace();
    let only = children.next()?.parse().ok()?;
    children.next().is_none().then_some(only)
}

/// Returns the kernel's letter for the state of a process.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse(i32::try_from(pid).ok()?, &stat).map(|process| process.state)
}

/// Sends SIGKILL to each descendant.
pub(super) fn kill() {
    for process in living() {
        if let Some(pid) = Pid::from_raw(process.pid) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Kills and reaps until none is left. Returns a description of those that could not be killed. `reaped` is called for each
/// process that ended.
pub(super) fn sweep(mut reaped: impl FnMut(Pid, rustix::process::WaitStatus)) -> Vec<String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        kill();
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            reaped(pid, status);
        }
        let left = living();
        if left.is_empty() {
            return Vec::new();
        }
        if Instant::now() >= deadline {
            return left.iter().map(|p| format!("pid {} ({}, state {})", p.pid, p.name, p.state)).collect();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_shell_that_waits_for_a_stopped_program_is_the_programs() {
        // Two commands: with one, the shell would be replaced by it.
        let mut shell = std::process::Command::new("sh");
        let mut shell =
            shell.args(["-c", "sleep 600; true"]).stderr(std::process::Stdio::null()).spawn().expect("sh");
        let deadline = Instant::now() + Duration::from_secs(60);
        let wait_for = |found: &dyn Fn() -> bool| {
            while !found() {
                assert!(Instant::now() < deadline, "it never came to that");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let program = || only_child(shell.id()).and_then(|pid| Pid::from_raw(pid.cast_signed()));
        wait_for(&|| program().is_some());
        let program = program().expect("found");
        wait_for(&|| program_state(shell.id()) == Some('S'));
        kill_process(program, Signal::STOP).expect("stopped");
        wait_for(&|| program_state(shell.id()) == Some('T'));
        assert_eq!(state(shell.id()), Some('S'), "the shell itself sleeps");
        kill_process(program, Signal::KILL).expect("killed");
        shell.wait().expect("reaped");
        assert_eq!(program_state(shell.id()), None);
    }

    #[test]
    fn a_process_may_have_parentheses_and_spaces_in_its_name() {
        let process = parse(7, b"7 (a) Z 1 (b) S 42 7 7 0").expect("parsed");
        assert_eq!((process.parent, process.state, process.name.as_str()), (42, 'S', "a) Z 1 (b"));
    }
}
