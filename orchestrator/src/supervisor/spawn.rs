//! Starts one rank so that it cannot outlive the launcher.
//!
//! `unsafe`, because `pre_exec` has no safe form.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;

use nix::sys::signal::SigSet;
use rustix::io::FdFlags;
use rustix::process::{
    Resource, Rlimit, Signal, getpid, getppid, set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Resources that a process may use.
#[derive(Clone, Copy)]
pub(super) struct Resources {
    /// Its limit on open files.
    pub(super) descriptors: Rlimit,
    /// Its processors; `None` for those of the launcher.
    pub(super) processors: Option<CpuSet>,
}

/// Starts `command` in a separate process group, with `inherited` left open under its number and these resources, allowed to
/// write to a terminal from the background if it does so itself, and bound to die with the calling *thread*: the kernel counts that
/// as the parent, so call this from one that lives as long as the launcher.
///
/// # Errors
/// Returns the operating system's error; `NotFound` and `PermissionDenied` are about the program.
#[expect(unsafe_code, reason = "pre_exec has no safe form")]
pub(super) fn spawn(
    command: &mut Command,
    inherited: Arc<impl AsFd + Send + Sync + 'static>,
    Resources { descriptors, processors }: Resources,
    writes_to_terminal: bool,
) -> io::Result<Child> {
    let launcher = getpid();
    command.process_group(0);
    let on_output = SigSet::from(nix::sys::signal::Signal::SIGTTOU);
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The launcher may have died before that took effect; no signal would arrive then.
        if getppid() != Some(launcher) {
            return Err(io::Error::from(rustix::io::Errno::SRCH));
        }
        rustix::io::fcntl_setfd(inherited.as_fd(), FdFlags::empty())?;
        // The launcher raised its own limit, which a program that uses select() would not expect.
        setrlimit(Resource::Nofile, descriptors)?;
        if writes_to_terminal {
            // With `stty tostop`, the signal would stop a process that is not in the foreground.
            on_output.thread_block()?;
        }
        if let Some(processors) = &processors {
            // They may have been taken from the launcher meanwhile. Then the rank runs where the launcher may.
            let _ = sched_setaffinity(None, processors);
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe functions may be called. These are plain system calls (prctl,
    // getppid, fcntl, setrlimit, sched_setaffinity) through rustix, and pthread_sigmask through nix, which neither allocate nor
    // lock; the errors made of an errno do not allocate either. What cannot be checked here: that rustix and nix keep it so.
    unsafe {
        command.pre_exec(prepare);
    }
    command.spawn()
}

/// Returns the number under which a child finds a descriptor that [`spawn`] left open.
pub(super) fn number(descriptor: &impl AsFd) -> i32 {
    descriptor.as_fd().as_raw_fd()
}
