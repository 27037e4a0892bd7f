//! Lets a rank sleep until a peer has written to it, or read from it.
//!
//! If all links of a group go through memory, the sleeping rank waits on a futex. A rank that also waits for sockets polls them
//! together with a pipe, which peers open with the segment.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FileType, fstat};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::thread::futex;

use super::segment::{Segment, open_in};
use crate::cpu::poll::{poll_for, timespec};

/// Offsets of the words that wake a segment's owner, each in a cache line of its own.
const RUNG: usize = 0;
const ASLEEP: usize = 64;

/// The doorbell that peers ring when they have written, or made room.
#[derive(Debug)]
pub(in crate::cpu) struct Doorbell {
    segment: Arc<Segment>,
    /// Its ends for reading and for writing: without a writer, a poll would always report news.
    pipe: Option<(OwnedFd, OwnedFd)>,
}

impl Doorbell {
    /// The longest sleep: the interval at which a rank checks its sockets, which show that a peer has left.
    pub(in crate::cpu) const NAP: Duration = Duration::from_millis(10);

    /// Creates the doorbell of the owner of `segment`. `has_sockets` is true if the owner also waits for sockets.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn new(segment: &Arc<Segment>, has_sockets: bool) -> io::Result<Self> {
        let pipe = has_sockets.then(|| pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)).transpose()?;
        Ok(Self { segment: Arc::clone(segment), pipe })
    }

    /// Returns the number of the pipe's descriptor, if the owner also waits for sockets.
    pub(in crate::cpu) fn pipe(&self) -> Option<u32> {
        self.pipe.as_ref().map(|(reader, _)| reader.as_raw_fd() as u32)
    }

    /// Sleeps until a peer rings, a descriptor has news, or at most for this time. Returns at once if there is something to do.
    ///
    /// # Errors
    /// Those of `poll`.
    pub(in crate::cpu) fn sleep<'a>(
        &'a self,
        most: Duration,
        mut descriptors: Vec<PollFd<'a>>,
        has_work: impl FnOnce() -> bool,
    ) -> io::Result<()> {
        let (rung, asleep) = (self.segment.word(RUNG), self.segment.word(ASLEEP));
        let before = rung.load(Acquire);
        asleep.store(1, SeqCst);
        fence(SeqCst);
        let slept = match &self.pipe {
            _ if has_work() => Ok(()),
            // A peer has left, and its link is a socket again.
            None if !descriptors.is_empty() => poll_for(&mut descriptors, most),
            None => {
                // It was rung, interrupted or slept enough: the caller checks in any case.
                let _ = futex::wait(rung, futex::Flags::empty(), before, Some(&timespec(most)));
                Ok(())
            }
            Some((reader, _)) => {
                descriptors.push(PollFd::new(reader, PollFlags::IN));
                let polled = poll_for(&mut descriptors, most);
                // Earlier rings. If there are more, the next sleep ends at once, which does no harm.
                let _ = rustix::io::read(reader, &mut [0u8; 64]);
                polled
            }
        };
        asleep.store(0, Relaxed);
        slept
    }
}

/// Rings the doorbell of a peer.
#[derive(Debug)]
pub(in crate::cpu) struct Waker {
    segment: Arc<Segment>,
    pipe: Option<OwnedFd>,
}

impl Waker {
    /// Creates the waker of process `pid`, the owner of this segment. `pipe` is the descriptor's number in that process.
    ///
    /// # Errors
    /// Those of the system, and one if the descriptor is no pipe's.
    pub(super) fn new(segment: Segment, pid: u32, pipe: Option<u32>) -> io::Result<Self> {
        let pipe = pipe.map(|number| open_pipe(pid, number)).transpose()?;
        Ok(Self { segment: Arc::new(segment), pipe })
    }

    pub(super) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Wakes the peer if it sleeps. The data for it must have been published.
    pub(super) fn wake(&self) {
        fence(SeqCst);
        if self.segment.word(ASLEEP).load(Relaxed) == 0 {
            return;
        }
        if let Some(pipe) = &self.pipe {
            // A full pipe wakes the peer as well, and nothing else can go wrong.
            let _ = rustix::io::write(pipe, &[0]);
            return;
        }
        let rung = self.segment.word(RUNG);
        rung.fetch_add(1, Release);
        // A missing sleeper is no failure, and nothing else can go wrong with a mapped word.
        let _ = futex::wake(rung, futex::Flags::empty(), 1);
    }
}

/// Opens the pipe, also for reading: a write then raises no signal after the owner has exited.
fn open_pipe(pid: u32, descriptor: u32) -> io::Result<OwnedFd> {
    let pipe = open_in(pid, descriptor, "pipe:")?;
    // It may have become another file after the check of its name.
    match FileType::from_raw_mode(fstat(&pipe)?.st_mode) {
        FileType::Fifo => Ok(pipe),
        _ => Err(io::Error::other("the descriptor is not that of a pipe")),
    }
}
