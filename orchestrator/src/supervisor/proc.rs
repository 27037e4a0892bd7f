//! Processes, as /proc describes them. Whatever cannot be read is unknown, and all of it where /proc is not `is_own`.

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

/// One process.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(super) pid: u32,
    pub(super) parent: u32,
    /// Its process group.
    pub(super) group: u32,
    /// The kernel's letter for its state.
    pub(super) state: char,
    pub(super) name: String,
    /// CPU time of all its threads.
    pub(super) cpu: Duration,
    /// Resident memory.
    pub(crate) resident_bytes: u64,
}

impl Process {
    /// Reads a process; `None` if there is none.
    pub(crate) fn read(pid: u32) -> Option<Self> {
        parse(pid, &file(pid, "stat")?)
    }

    /// Returns all processes.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let folder = is_own().then(|| std::fs::read_dir("/proc").ok()).flatten();
        let entries = folder.into_iter().flatten().flatten();
        entries.filter_map(|entry| Self::read(entry.file_name().to_str()?.parse().ok()?))
    }

    /// Returns the program of a rank: its process, or the process that it waits for, as with `sh -c PROGRAM`.
    pub(super) fn program(pid: u32) -> Option<Self> {
        let own = Self::read(pid)?;
        let waits_for = || only_child(pid).filter(|_| waits_for_a_child(pid)).and_then(Self::program);
        Some(waits_for().unwrap_or(own))
    }

    /// Returns true if the process has a handler for a signal.
    pub(super) fn handles(&self, signal: i32) -> bool {
        self.has("SigCgt:", signal)
    }

    /// Returns true if the process ignores a signal.
    pub(super) fn ignores(&self, signal: i32) -> bool {
        self.has("SigIgn:", signal)
    }

    /// Returns true if a signal is in this set of its status.
    fn has(&self, set: &str, signal: i32) -> bool {
        let mask = self.status(set).and_then(|mask| u64::from_str_radix(&mask, 16).ok());
        mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
    }

    /// Returns the processors that its first thread may use, as a list.
    pub(super) fn cpus(&self) -> Option<String> {
        self.status("Cpus_allowed_list:")
    }

    /// Returns the value of a line of its status.
    fn status(&self, name: &str) -> Option<String> {
        let status = text(self.pid, "status")?;
        status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
    }

    /// Returns the system call, or else the function of the kernel, in which its first thread waits.
    pub(super) fn waits_in(&self) -> Option<String> {
        let number =
            text(self.pid, "syscall").and_then(|text| text.split_ascii_whitespace().next()?.parse().ok());
        let kernel = || text(self.pid, "wchan").filter(|name| !matches!(name.as_str(), "" | "0"));
        number.and_then(system_call).map(str::to_owned).or_else(kernel)
    }
}

/// Returns true if /proc is that of this PID namespace. It may be missing, or that of another namespace, as after `unshare --pid`
/// without `--mount-proc`: there, our numbers are those of other processes.
pub(super) fn is_own() -> bool {
    static IS_OWN: LazyLock<bool> = LazyLock::new(|| {
        let shown = std::fs::read_link("/proc/self");
        shown.is_ok_and(|shown| shown == Path::new(&std::process::id().to_string()))
    });
    *IS_OWN
}

/// Returns a file of a process.
fn file(pid: u32, name: &str) -> Option<Vec<u8>> {
    if is_own() { std::fs::read(format!("/proc/{pid}/{name}")).ok() } else { None }
}

/// Returns a file of a process, as text.
fn text(pid: u32, name: &str) -> Option<String> {
    String::from_utf8(file(pid, name)?).ok()
}

/// Returns the children of the first thread of a process, to which the kernel also gives orphans.
pub(super) fn children(pid: u32) -> Vec<u32> {
    let children = text(pid, &format!("task/{pid}/children")).unwrap_or_default();
    children.split_ascii_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Returns the number of processes of this host that the kernel has killed for memory since it started.
pub(super) fn killed_for_memory() -> Option<u64> {
    let counters = std::fs::read_to_string("/proc/vmstat").ok()?;
    counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Parses `pid (name) state ppid …`, where the name may contain anything, parentheses and spaces included.
fn parse(pid: u32, stat: &[u8]) -> Option<Process> {
    let stat = String::from_utf8_lossy(stat);
    let (head, tail) = stat.rsplit_once(')')?;
    // The first of them is field 3 of proc_pid_stat(5).
    let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3).and_then(|text| text.parse::<u64>().ok());
    Some(Process {
        pid,
        parent: u32::try_from(number(4)?).ok()?,
        group: u32::try_from(number(5)?).ok()?,
        state: fields.first()?.chars().next()?,
        name: head.split_once('(')?.1.to_owned(),
        cpu: Duration::from_millis(
            (number(14).unwrap_or(0) + number(15).unwrap_or(0)) * 1000
                / rustix::param::clock_ticks_per_second(),
        ),
        resident_bytes: number(24).unwrap_or(0) * rustix::param::page_size() as u64,
    })
}

/// Returns the child of a process that has exactly one; of its first thread, which is the only one of a shell.
fn only_child(pid: u32) -> Option<u32> {
    let [only] = children(pid)[..] else { return None };
    Some(only)
}

/// Returns true if the first thread of a process waits for a child of it.
fn waits_for_a_child(pid: u32) -> bool {
    text(pid, "wchan").is_some_and(|name| name == "do_wait")
}

/// Returns the name of a system call that waits.
const fn system_call(number: u64) -> Option<&'static str> {
    // Without the numbers of an architecture, the function of the kernel is shown.
    if !cfg!(target_arch = "x86_64") {
        return None;
    }
    Some(match number {
        0 => "read",
        1 => "write",
        7 => "poll",
        23 => "select",
        34 => "pause",
        35 => "nanosleep",
        42 => "connect",
        43 | 288 => "accept",
        45 | 47 => "recv",
        44 | 46 => "send",
        61 | 247 => "wait for a child",
        73 => "flock",
        202 => "futex (a lock or a condition)",
        230 => "clock_nanosleep",
        232 | 281 => "epoll_wait",
        270 => "pselect",
        271 => "ppoll",
        74 | 75 => "fsync",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    #[test]
    fn a_process_may_have_parentheses_and_spaces_in_its_name() {
        let stat = b"7 (a) Z 1 (b) S 42 7 7 0 -1 0 0 0 0 0 150 50 0 0 20 0 1 0 1 4096 3 0";
        let process = parse(7, stat).expect("parsed");
        assert_eq!((process.parent, process.state, process.name.as_str()), (42, 'S', "a) Z 1 (b"));
        assert_eq!(process.cpu, Duration::from_secs(2));
        assert_eq!(process.resident_bytes, 3 * rustix::param::page_size() as u64);
    }

    #[test]
    fn the_program_of_a_shell_that_waits_for_it_is_its_child() {
        // Two commands: with one, the shell would be replaced by it.
        let mut shell = std::process::Command::new("sh");
        let mut shell =
            shell.args(["-c", "sleep 600; true"]).stderr(std::process::Stdio::null()).spawn().expect("sh");
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let wait_for = |found: &dyn Fn(&Process) -> bool| loop {
            assert!(std::time::Instant::now() < deadline, "it never came to that");
            if let Some(program) = Process::program(shell.id()).filter(found) {
                return program;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let program = wait_for(&|program| program.name == "sleep" && program.state == 'S');
        assert_eq!(program.parent, shell.id());
        let pid = Pid::from_raw(program.pid.cast_signed()).expect("a pid");
        kill_process(pid, Signal::STOP).expect("stopped");
        wait_for(&|program| program.state == 'T');
        // The shell hears of the stop, and then sleeps on.
        let state = Process::read(shell.id()).map(|shell| shell.state);
        assert!(matches!(state, Some('R' | 'S')), "the shell itself is not stopped: {state:?}");
        kill_process(pid, Signal::KILL).expect("killed");
        shell.wait().expect("reaped");
        assert!(Process::program(shell.id()).is_none());
    }

    #[test]
    fn this_process_is_described() {
        let own = Process::read(std::process::id()).expect("this process");
        assert!(own.resident_bytes > 1 << 20 && matches!(own.state, 'R' | 'S'));
        assert!(Process::all().any(|process| process.pid == own.pid));
        assert!(own.cpus().is_some_and(|list| list.starts_with(|c: char| c.is_ascii_digit())));
    }
}
