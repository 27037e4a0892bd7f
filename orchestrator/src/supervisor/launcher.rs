//! The launcher: the process that the user sees. It holds the lifeline of the supervisor, its child.
//!
//! ```text
//! launcher (ryz launch) ── lifeline ──▶ supervisor ──▶ rank 0, rank 1, …
//! ```
//!
//! If either of the two is killed, the other ends everything: the supervisor when its lifeline closes, the launcher when
//! its only child exits. Both are subreapers, so grandchildren that left their session or lost their parents are found.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use super::core::signal as number;
use super::descendants;
use crate::console;

/// The signals that are for the ranks alone: batch systems send them before a limit.
const FOR_RANKS: [Signal; 5] = [Signal::USR1, Signal::USR2, Signal::ALARM, Signal::XCPU, Signal::QUIT];

/// Receives the signals that are for the ranks alone.
pub(super) struct PassedOn(Vec<(Signal, tokio::signal::unix::Signal)>);

impl PassedOn {
    pub(super) fn listen() -> io::Result<Self> {
        let listen = |number: Signal| Ok((number, signal(SignalKind::from_raw(number.as_raw()))?));
        FOR_RANKS.into_iter().map(listen).collect::<io::Result<_>>().map(Self)
    }

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

/// Runs the supervisor, forwards signals to it, and returns the exit code. The supervisor's lifeline is its standard input.
/// Messages go to [`console::stderr`]; [flush](console::flush) it before you exit.
///
/// # Errors
/// Returns the operating system's error, when the supervisor cannot be started.
pub fn run_supervisor(mut supervisor: Command) -> io::Result<i32> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async move {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let mut ended = signal(SignalKind::child())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let mut passed_on = PassedOn::listen()?;
        // In a separate process group, so that Ctrl-C on the terminal reaches it once, through this process.
        let mut child = supervisor.stdin(Stdio::piped()).process_group(0).spawn()?;
        let lifeline = child.stdin.take();
        let pid = Pid::from_child(&child);
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            let asked = tokio::select! {
                _ = ended.recv() => continue,
                _ = interrupt.recv() => Signal::INT,
                _ = terminate.recv() => Signal::TERM,
                _ = hangup.recv() => Signal::HUP,
                signal = passed_on.recv() => signal,
            };
            let _ = kill_process(pid, asked);
        };
        drop(lifeline);
        let left = descendants::sweep(|_, _| {});
        for process in left {
            console::stderr().say(&format!("ryz: could not be killed: {process}\n"));
        }
        Ok(match (status.code(), status.signal()) {
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
