//! How a rank sleeps until a peer has written to it, or read from it.
//!
//! If all of a group's links go through memory, the sleeper waits on a futex. A rank that waits for sockets too polls them together with
//! a pipe, which peers open as they open the segment.

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

/// What the peers ring when they have written, or made room.
#[derive(Debug)]
pub(in crate::cpu) struct Doorbell {
    segment: Arc<Segment>,
    /// Its ends for reading and for writing: without a writer it would always have news.
    pipe: Option<(OwnedFd, OwnedFd)>,
}

impl Doorbell {
    /// The longest sleep: so often a rank looks at its sockets, which tell when a peer has gone.
    pub(in crate::cpu) const NAP: Duration = Duration::from_millis(10);

    /// Of the owner of `segment`. `has_sockets`: whether it waits for sockets too.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn new(segment: &Arc<Segment>, has_sockets: bool) -> io::Result<Self> {
        let pipe = has_sockets.then(|| pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)).transpose()?;
        Ok(Self { segment: Arc::clone(segment), pipe })
    }

    /// The number of the pipe's descriptor, if the owner waits for sockets too.
    pub(in crate::cpu) fn pipe(&self) -> Option<u32> {
        self.pipe.as_ref().map(|(reader, _)| reader.as_raw_fd() as u32)
    }

    /// Sleeps until a peer rings, a descriptor has news, or for this long at most; returns at once if there is something to do.
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
                // Rung meanwhile, interrupted or slept enough: the caller looks in any case.
                let _ = futex::wait(rung, futex::Flags::empty(), before, Some(&timespec(most)));
                Ok(())
            }
            Some((reader, _)) => {
                descriptors.push(PollFd::new(reader, PollFlags::IN));
                let polled = poll_for(&mut descriptors, most);
                // What was rung before this sleep. More than that wakes the next one, which does no harm.
                let _ = rustix::io::read(reader, &mut [0u8; 64]);
                polled
            }
        };
        asleep.store(0, Relaxed);
        slept
    }
}

/// ByteQueues a peer's doorbell.
#[derive(Debug)]
pub(in crate::cpu) struct Waker {
    segment: Arc<Segment>,
    pipe: Option<OwnedFd>,
}

impl Waker {
    /// Of process `pid`, whose segment this is. `pipe`: the descriptor's number in that process.
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

    /// Wakes the peer if it sleeps. What it is to see has been published.
    pub(super) fn wake(&self) {
        fence(SeqCst);
        if self.segment.word(ASLEEP).load(Relaxed) == 0 {
            return;
        }
        if let Some(pipe) = &self.pipe {
            // A pipe that is full wakes as well, and nothing else can go wrong.
            let _ = rustix::io::write(pipe, &[0]);
            return;
        }
        let rung = self.segment.word(RUNG);
        rung.fetch_add(1, Release);
        // Nobody to wake is no failure, and nothing else can go wrong with a word that is mapped.
        let _ = futex::wake(rung, futex::Flags::empty(), 1);
    }
}

/// Opened for reading too: a write then raises no signal after the owner has gone.
fn open_pipe(pid: u32, descriptor: u32) -> io::Result<OwnedFd> {
    let pipe = open_in(pid, descriptor, "pipe:")?;
    // It may have become another file after the look at its name.
    match FileType::from_raw_mode(fstat(&pipe)?.st_mode) {
        FileType::Fifo => Ok(pipe),
        _ => Err(io::Error::other("the descriptor is not that of a pipe")),
    }
}
