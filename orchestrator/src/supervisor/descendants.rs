//! Finds and kills every descendant of this process.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, kill_process, kill_process_group, wait,
    waitid,
};

use super::proc::{self, Process};

/// Timeout for killed processes to disappear. Those in an uninterruptible wait are reported.
const PATIENCE: Duration = Duration::from_secs(2);

/// Number of times that the children alone are killed between two looks at all processes.
const ROUNDS: usize = 100;

/// Returns all living descendants of this process, nearest first. Orphans count while this process is the subreaper.
fn living() -> Vec<Process> {
    let mut children: HashMap<u32, Vec<Process>> = HashMap::new();
    for process in Process::all() {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = children.remove(&std::process::id()).unwrap_or_default();
    let mut next = 0;
    while let Some(pid) = found.get(next).map(|process| process.pid) {
        found.extend(children.remove(&pid).unwrap_or_default());
        next += 1;
    }
    found.retain(|process| !matches!(process.state, 'Z' | 'X'));
    found
}

/// Sends SIGKILL to these ranks, to their process groups, and to each descendant that /proc shows.
pub(super) fn kill(ranks: &[Pid]) {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    for rank in ranks {
        // While this process has such a child, nobody else has the number.
        if waitid(WaitId::Pid(*rank), look).is_ok() {
            let _ = kill_process(*rank, Signal::KILL);
        }
        if waitid(WaitId::Pgid(Some(*rank)), look).is_ok() {
            let _ = kill_process_group(*rank, Signal::KILL);
        }
    }
    for process in living() {
        if let Some(pid) = Pid::from_raw(process.pid.cast_signed()) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Kills and reaps until none is left. Returns a description of those that could not be killed. `reaped` is called for each
/// process that ended.
pub(super) fn sweep(ranks: &[Pid], mut reaped: impl FnMut(Pid, WaitStatus)) -> Vec<String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        kill(ranks);
        // A process that starts another one and ends is gone before it is found above. Its successor becomes a child of this
        // process: only the kernel's word that there are no children proves that nothing is left.
        for _ in 0..ROUNDS {
            loop {
                match wait(WaitOptions::NOHANG) {
                    Ok(Some((pid, status))) => reaped(pid, status),
                    Ok(None) => break,
                    Err(Errno::INTR) => {}
                    Err(_) => return Vec::new(),
                }
            }
            kill_children();
        }
        if Instant::now() >= deadline {
            let left = living();
            let described = left.iter().map(|p| format!("pid {} ({}, state {})", p.pid, p.name, p.state));
            let described: Vec<String> = described.collect();
            let elusive = || {
                if proc::is_own() {
                    "processes that start others faster than they can be killed"
                } else {
                    "processes outside the process groups of ranks, which /proc does not show here"
                }
            };
            return if described.is_empty() { vec![elusive().to_owned()] } else { described };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Kills the children of this process, quickly: without a look at all other processes.
fn kill_children() {
    let children = proc::children(std::process::id());
    for pid in children.into_iter().filter_map(|pid| Pid::from_raw(pid.cast_signed())) {
        // Not reaped yet, so no other process has this number.
        let _ = kill_process(pid, Signal::KILL);
    }
}
