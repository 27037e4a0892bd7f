//! The launcher: the process that the user sees. It holds the lifeline of the supervisor, its child.
//!
//! ```text
//! launcher (ryz launch) ── lifeline ──▶ supervisor ──▶ rank 0, rank 1, …
//! ```
//!
//! If either of the two is killed, the other ends everything: the supervisor when its lifeline closes, the launcher when
//! its only child exits. Both are subreapers, so grandchildren that left their session or lost their parents are found.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{SigSet, SigmaskHow};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};
use tokio::signal::unix::{SignalKind, signal};

use super::core::signal as number;
use super::descendants;
use super::proc::Process;
use crate::console;

/// The signals that end a job.
pub(super) const TO_END: [Signal; 3] = [Signal::INT, Signal::TERM, Signal::HUP];

/// The signals that are for the ranks alone: batch systems send them before a limit.
pub(super) const FOR_RANKS: [Signal; 5] =
    [Signal::USR1, Signal::USR2, Signal::ALARM, Signal::XCPU, Signal::QUIT];

/// The signal for a write beyond `ulimit -f`: with a handler, the write fails, and its error is told.
pub(super) const FILE_TOO_LARGE: Signal = Signal::XFSZ;

/// Receives signals.
pub(super) struct Signals(Vec<(Signal, tokio::signal::unix::Signal)>);

impl Signals {
    /// Listens to these signals, also if the program that started this one had blocked them. Those that it made this one ignore
    /// stay ignored, as with `nohup`, except that a launcher can always be asked to end, and must know its children.
    pub(super) fn listen(signals: impl IntoIterator<Item = Signal>) -> io::Result<Self> {
        let own = Process::read(std::process::id());
        let is_heard = |signal: &Signal| {
            matches!(*signal, Signal::TERM | Signal::CHILD)
                || own.as_ref().is_none_or(|own| !own.ignores(signal.as_raw()))
        };
        let listen = |number: Signal| Ok((number, signal(SignalKind::from_raw(number.as_raw()))?));
        let heard = signals.into_iter().filter(is_heard).map(listen).collect::<io::Result<_>>()?;
        // Only now: a signal that waits for this would end the process.
        SigSet::empty().thread_set_mask()?;
        Ok(Self(heard))
    }

    /// Returns the next signal. Of several, the first in the order of [`Signals::listen`].
    pub(super) async fn recv(&mut self) -> Signal {
        std::future::poll_fn(|context| {
            for (number, signal) in &mut self.0 {
                if signal.poll_recv(context).is_ready() {
                    return std::task::Poll::Ready(*number);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}

/// Reaps every child that has ended, and returns the exit of `supervisor` if it is among them. Process 1 of a container is the
/// parent of all orphans in it.
fn reap(supervisor: Pid) -> Option<WaitStatus> {
    let mut ended = None;
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        if pid == supervisor {
            ended = Some(status);
        }
    }
    ended
}

/// Runs the supervisor, forwards signals to it, and returns the exit code. The supervisor's lifeline is its standard input.
/// Messages go to [`console::stderr`]; [flush](console::flush) it before you exit.
///
/// # Errors
/// Returns the operating system's error, when the supervisor cannot be started.
pub fn run_supervisor(mut supervisor: Command) -> io::Result<i32> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async move {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let mut signals =
            Signals::listen([Signal::CHILD, FILE_TOO_LARGE].into_iter().chain(TO_END).chain(FOR_RANKS))?;
        // The supervisor inherits the mask: these signals wait until it listens. It is in a separate process group, so that Ctrl-C on
        // the terminal reaches it once, through this process.
        let to_wait =
            FOR_RANKS.into_iter().filter_map(|s| nix::sys::signal::Signal::try_from(s.as_raw()).ok());
        let mask = to_wait.collect::<SigSet>().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let child = supervisor.stdin(Stdio::piped()).process_group(0).spawn();
        mask.thread_set_mask()?;
        let mut child = child?;
        let lifeline = child.stdin.take();
        let pid = Pid::from_child(&child);
        let status = loop {
            if let Some(status) = reap(pid) {
                break status;
            }
            match signals.recv().await {
                Signal::CHILD | FILE_TOO_LARGE => {}
                asked => drop(kill_process(pid, asked)),
            }
        };
        drop(lifeline);
        let left = descendants::sweep(&[], |_, _| {});
        for process in left {
            console::stderr().say(&format!("ryz: could not be killed: {process}\n"));
        }
        Ok(match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => code,
            (None, signal) => {
                let signal = signal.unwrap_or(number::KILL);
                console::stderr().say(&format!(
                    "ryz: the launcher's supervisor was killed by signal {signal}; every rank was ended\n"
                ));
                128 + signal
            }
        })
    })
}
