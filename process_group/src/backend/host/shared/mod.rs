//! Memory that all ranks of a host share, through which the bytes of their links go.
//!
//! Every rank makes one segment a group, an unnamed file in memory, and tells its peers the number of its descriptor. They open
//! it as `/proc/PID/fd/NUMBER` and map it; then the descriptors are closed, so that nothing is left behind however a rank ends.
//! The sockets stay: when a peer's end of one closes, the peer has gone.

mod ring;
mod segment;
mod stores;
#[cfg(test)]
pub(super) mod tests;

use std::io;
use std::sync::Arc;

pub(super) use ring::{Bell, Rings};
use ring::{Layout, TOKEN};
use segment::Door;
pub(super) use segment::Segment;

use crate::mesh::Peers;
use crate::roster::Secret;

/// What a rank tells its peers of its segment: process, descriptor and token. Zeros if it has none.
pub(super) const INTRODUCTION: usize = 40;

type Token = [u8; 32];

/// Where a rank's segment is to be found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Introduction {
    pid: u32,
    descriptor: u32,
    token: Token,
}

impl Introduction {
    pub(super) fn encode(&self) -> [u8; INTRODUCTION] {
        let mut bytes = [0; INTRODUCTION];
        bytes[..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.descriptor.to_le_bytes());
        bytes[8..].copy_from_slice(&self.token);
        bytes
    }

    /// `None` from a rank that has no segment.
    pub(super) fn decode(bytes: &[u8; INTRODUCTION]) -> Option<Self> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let token = bytes[8..].try_into().expect("32 bytes");
        (u32_at(0) != 0).then(|| Self { pid: u32_at(0), descriptor: u32_at(4), token })
    }
}

/// This rank's segment before the peers have it.
#[derive(Debug)]
pub(super) struct Offered {
    rank: usize,
    layout: Layout,
    segment: Arc<Segment>,
    door: Door,
    token: Token,
}

/// All segments of a group, which this rank has opened and checked.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) rings: Peers<Rings>,
    pub(super) bell: Bell,
}

impl Offered {
    /// A new segment of rank `rank`.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn new(rank: usize, world_size: usize) -> io::Result<Self> {
        let (layout, token) = (Layout::of(world_size), *Secret::random().expose());
        let (segment, door) = Segment::create(layout.len())?;
        segment.write(TOKEN, &token, false);
        Ok(Self { rank, layout, segment: Arc::new(segment), door, token })
    }

    pub(super) fn introduction(&self) -> Introduction {
        Introduction { pid: std::process::id(), descriptor: self.door.number(), token: self.token }
    }

    /// Opens a peer's segment and finds its token there.
    ///
    /// # Errors
    /// Those of the system, and one if another token is there.
    pub(super) fn open(&self, peer: &Introduction) -> io::Result<Arc<Segment>> {
        let segment = Segment::open(peer.pid, peer.descriptor, self.layout.len())?;
        let mut seen = Token::default();
        segment.read(TOKEN, &mut seen);
        if seen != peer.token {
            return Err(io::Error::other("it is not the memory that the rank announced"));
        }
        Ok(Arc::new(segment))
    }

    /// The rings to and from all peers, whose segments are `theirs`. Closes the descriptor: all peers must have opened it.
    pub(super) fn share(self, theirs: Peers<Arc<Segment>>) -> Shared {
        let (layout, own) = (self.layout, (self.rank, &self.segment));
        let rings = theirs.map(|peer, segment| Rings::new(layout, own, (peer.index(), &segment)));
        Shared { rings, bell: Bell(self.segment) }
    }
}
