//! Finds and kills every descendant of this process.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use super::proc::Process;

/// Timeout for killed processes to disappear. Those in an uninterruptible wait are reported.
const PATIENCE: Duration = Duration::from_secs(2);

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

/// Sends SIGKILL to each descendant.
pub(super) fn kill() {
    for process in living() {
        if let Some(pid) = Pid::from_raw(process.pid.cast_signed()) {
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
