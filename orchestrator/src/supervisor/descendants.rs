//! Finds and kills every descendant of this process.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};

use super::proc::Process;

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
pub(super) fn sweep(mut reaped: impl FnMut(Pid, WaitStatus)) -> Vec<String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        kill();
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
            let elusive = || vec!["processes that start others faster than they can be killed".to_owned()];
            return if described.is_empty() { elusive() } else { described };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Kills the children of this process, quickly: without a look at all other processes.
fn kill_children() {
    // The kernel gives orphans to the first thread.
    let path = format!("/proc/self/task/{}/children", std::process::id());
    let children = std::fs::read_to_string(path).unwrap_or_default();
    for pid in children.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
        // Not reaped yet, so no other process has this number.
        let _ = kill_process(pid, Signal::KILL);
    }
}
