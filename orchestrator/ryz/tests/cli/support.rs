//! Runs `ryz` with a deadline on everything, and finds every process that came of it.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Timeout of anything that might hang. The machine may be busy.
pub(crate) const LONG: Duration = Duration::from_secs(300);

const MARK: &str = "TEST_FAMILY";

/// One run of `ryz`. All processes that come of it carry a mark in their environment, whatever they do to their parents
/// and sessions, and none survives this value.
pub(crate) struct Run {
    child: Child,
    mark: String,
}

impl Run {
    pub(crate) fn new(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::in_folder(Path::new("."), arguments, environment)
    }

    pub(crate) fn in_folder(folder: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(ryz());
        // Tests ignore the user's own table of paths, unless they write one.
        command.env("XDG_STATE_HOME", "/nowhere");
        command.args(arguments).current_dir(folder).envs(environment.iter().copied());
        Self::of(command)
    }

    /// Of a command that starts `ryz`.
    pub(crate) fn of(mut command: Command) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        hear_interrupts();
        let child = command
            .env(MARK, &mark)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ryz starts");
        Self { child, mark }
    }

    /// Every rank runs this as a shell script.
    pub(crate) fn launch(flags: &[&str], script: &str) -> Self {
        Self::new(&[&["launch"], flags, &["--", "sh", "-c", script]].concat(), &[])
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("signalled");
    }

    /// All living processes of this run.
    pub(crate) fn family(&self) -> Vec<u32> {
        let needle = format!("{MARK}={}\0", self.mark);
        let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
        processes
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|pid: &u32| {
                // Dead ones that wait to be reaped have no environment any more.
                let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                let environ = [&environ[..], b"\0"].concat();
                environ.windows(needle.len()).any(|window| window == needle.as_bytes())
            })
            .collect()
    }

    /// Waits until this many processes whose command line is `text` are there, and returns them.
    pub(crate) fn wait_for(&self, count: usize, text: &str) -> Vec<u32> {
        eventually(|| {
            let found: Vec<u32> =
                self.family().into_iter().filter(|pid| command_line(*pid).trim_end() == text).collect();
            (found.len() == count).then_some(found)
        })
        .unwrap_or_else(|| panic!("there were never {count} processes like `{text}`"))
    }

    /// The process between the launcher and its ranks.
    pub(crate) fn supervisor(&self) -> u32 {
        let is_it = |pid: &u32| command_line(*pid).contains(" __supervise ");
        eventually(|| self.family().into_iter().find(is_it)).expect("a supervisor")
    }

    /// The bytes of standard output and of standard error that have not been read.
    pub(crate) fn unread(&self) -> [u64; 2] {
        let [out, err] = [self.child.stdout.as_ref().map(unread), self.child.stderr.as_ref().map(unread)];
        [out.expect("piped"), err.expect("piped")]
    }

    /// Waits for the end, and gives its output.
    pub(crate) fn finish(mut self) -> Output {
        let (mut out, mut err) =
            (self.child.stdout.take().expect("piped"), self.child.stderr.take().expect("piped"));
        let out = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            out.read_to_end(&mut bytes).map(|_| bytes).expect("read")
        });
        let err = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            err.read_to_end(&mut bytes).map(|_| bytes).expect("read")
        });
        let status = self.wait();
        // Nobody may hold these open any longer: that would be a process left behind.
        let closed = eventually(|| (out.is_finished() && err.is_finished()).then_some(()));
        assert!(closed.is_some(), "somebody still writes: {:?}", self.family());
        Output { status, stdout: out.join().expect("read"), stderr: err.join().expect("read") }
    }

    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        eventually(|| self.child.try_wait().expect("waited")).expect("ryz ends in time")
    }
}

/// Makes the processes that are started from now on hear Ctrl-C: the background of a script ignores it, and so would they.
#[expect(unsafe_code, reason = "the action of a signal has no safe form")]
pub(crate) fn hear_interrupts() {
    use nix::sys::signal::{SigHandler, Signal, signal};

    // SAFETY: the default action runs no code.
    let before = unsafe { signal(Signal::SIGINT, SigHandler::SigDfl) };
    before.expect("a signal with a default action");
}

/// Where the test runs elsewhere than it was built, the variable says where `ryz` is.
pub(crate) fn ryz() -> std::ffi::OsString {
    std::env::var_os("CARGO_BIN_EXE_ryz").unwrap_or_else(|| env!("CARGO_BIN_EXE_ryz").into())
}

impl Drop for Run {
    fn drop(&mut self) {
        for pid in self.family() {
            if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        let _ = self.child.wait();
    }
}

fn unread(stream: &impl std::os::fd::AsFd) -> u64 {
    rustix::io::ioctl_fionread(stream).expect("a pipe")
}

pub(crate) fn command_line(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Asks again and again until there is an answer or too much time has passed.
pub(crate) fn eventually<T>(mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The last line of standard output, as JSON.
pub(crate) fn report(output: &Output) -> serde_json::Value {
    let stdout = text(&output.stdout);
    let line = stdout.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}
