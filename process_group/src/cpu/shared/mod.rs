//! Memory that all ranks of a host share; the bytes of their links go through it.
//!
//! A rank that shares its host makes one segment per group, an unnamed file in memory, and tells the other ranks of the host the
//! number of its descriptor. They open it as `/proc/PID/fd/NUMBER` and map it. Then the descriptors of the segments are closed: a
//! rank leaves nothing behind, however it ends. The sockets stay: when a peer's end of a socket closes, the peer has exited.

mod byte_queue;
mod doorbell;
mod segment;
#[cfg(test)]
pub(super) mod tests;

use std::io;
use std::sync::Arc;

pub(super) use byte_queue::ByteQueues;
use byte_queue::Layout;
use bytemuck::{Pod, Zeroable};
pub(super) use doorbell::Doorbell;
use doorbell::Waker;
use segment::{Segment, SegmentFd};

use crate::membership::roster::Secret;

/// Offset of the token that identifies the owner of a segment.
const TOKEN: usize = 128;

type Token = [u8; 32];

/// A rank's description of its segment to its peers. Its bytes travel as they are, within a host. Zeros if it has none.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct SegmentHandle {
    pid: u32,
    descriptor: u32,
    /// The number of the pipe's descriptor plus 1, or 0 if there is none.
    pipe: u32,
    token: Token,
}

impl SegmentHandle {
    /// Returns false for a rank that has no segment.
    pub(super) const fn exists(&self) -> bool {
        self.pid != 0
    }
}

/// This rank's segment, whose descriptor stays open until the peers have opened it too.
#[derive(Debug)]
pub(super) struct ExportedSegment {
    /// The rank's place on its host.
    place: usize,
    layout: Layout,
    segment: Arc<Segment>,
    descriptor: SegmentFd,
    token: Token,
    doorbell: Doorbell,
}

impl ExportedSegment {
    /// Creates the segment of the rank at `place` among `ranks` of its host. `has_sockets` is true if it has links to other hosts.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn new(place: usize, ranks: usize, has_sockets: bool) -> io::Result<Self> {
        let (layout, token) = (Layout::of(ranks), *Secret::random().expose());
        let (segment, descriptor) = Segment::create(layout.len())?;
        segment.write(TOKEN, &token);
        let segment = Arc::new(segment);
        let doorbell = Doorbell::new(&segment, has_sockets)?;
        Ok(Self { place, layout, segment, descriptor, token, doorbell })
    }

    pub(super) fn handle(&self) -> SegmentHandle {
        let (pid, descriptor) = (std::process::id(), self.descriptor.number());
        let pipe = self.doorbell.pipe().map_or(0, |number| number + 1);
        SegmentHandle { pid, descriptor, pipe, token: self.token }
    }

    /// Opens the segment of the rank at `place`, checks its token, and makes the rings to it and from it.
    ///
    /// # Errors
    /// Those of the system, and one if another token is there.
    pub(super) fn open(&self, peer: &SegmentHandle, place: usize) -> io::Result<ByteQueues> {
        let segment = Segment::open(peer.pid, peer.descriptor, self.layout.len())?;
        let mut seen = Token::default();
        segment.read(TOKEN, &mut seen);
        if seen != peer.token {
            return Err(io::Error::other("it is not the memory that the rank announced"));
        }
        let waker = Waker::new(segment, peer.pid, peer.pipe.checked_sub(1))?;
        Ok(ByteQueues::new(self.layout, (self.place, &self.segment), (place, waker)))
    }

    /// Closes the descriptor. All peers must have opened it.
    pub(super) fn close(self) -> Doorbell {
        self.doorbell
    }
}
