//! Payloads stay where they are, and receivers read them from their senders' memory.
//!
//! A message is a ready-to-send header with an address, one or more reads of the sender's memory, and an acknowledgement.
//! Only then is its send complete, so hazards hold back whatever would overwrite it, and the call does not return.
//!
//! A sender that gives up tells everybody *before* its caller gets the memory back (see
//! [`abort`](crate::backend::Backend::abort)). The executor therefore looks at the link after the last read and before it
//! acknowledges: if nothing is there, what was read was the message.

use super::{Outgoing, Sent, Transport};
use crate::backend::host::link::{Link, Moved};
use crate::mesh::memory::{ReadableProcess, address};
use crate::mesh::{Peer, Peers};
use crate::operation::Operation;
use crate::wire::frame::{Header, Kind};

/// From this many bytes on, two threads read a message whose sender only waits. Starting one takes some 30 µs. The built-in rule for such
/// messages begins above, so this counts for paths that are forced or were measured.
const HALVES_FROM: usize = 1 << 20;

/// Why a peer's memory could be read once and cannot now.
#[derive(Debug, thiserror::Error)]
#[error("its memory cannot be read any more: {0}")]
pub(in crate::backend::host) struct Unreadable(#[from] nix::Error);

#[derive(Debug)]
pub(in crate::backend::host) struct CrossMemory {
    peers: Peers<Remote>,
    /// Whether each rank may use several processors.
    has_processors: bool,
}

/// One peer's memory.
#[derive(Debug)]
struct Remote {
    process: ReadableProcess,
    /// Where the open message begins.
    address: u64,
    /// Whether the sender only waits while this rank reads, and a second thread has a processor.
    read_by_two: bool,
    /// What was read of it to be reduced.
    staging: Vec<u8>,
}

impl CrossMemory {
    /// `has_processors`: whether each rank may use several.
    pub(in crate::backend::host) fn new(processes: Peers<ReadableProcess>, has_processors: bool) -> Self {
        let remote = |_, process| Remote { process, address: 0, read_by_two: false, staging: Vec::new() };
        Self { peers: processes.map(remote), has_processors }
    }
}

impl Transport for CrossMemory {
    type Error = Unreadable;
    const IN_BAND: bool = false;
    const ZERO_COPY: bool = true;

    fn send(&mut self, _: Peer, link: &mut Link, message: &Outgoing<'_>) -> Sent {
        let address = address(message.payload);
        link.queue_control(&Header { kind: Kind::ReadyToSend, address, ..message.header }, &[]);
        Sent::Announced
    }

    fn open(&mut self, peer: Peer, header: &Header) {
        let is_broadcast = matches!(header.fingerprint.operation, Operation::Broadcast { .. });
        let read_by_two = self.has_processors && is_broadcast && self.peers.world_size() == 2;
        let remote = &mut self.peers[peer];
        (remote.address, remote.read_by_two) = (header.address, read_by_two);
    }

    fn receive(
        &mut self,
        peer: Peer,
        _: &mut Link,
        done: usize,
        into: &mut [u8],
    ) -> Result<Moved, Unreadable> {
        let &Remote { process, address, read_by_two, .. } = &self.peers[peer];
        if read_by_two && into.len() >= HALVES_FROM {
            process.read_by_two(address + done as u64, into)?;
        } else {
            process.read(address + done as u64, into)?;
        }
        Ok(Moved::Bytes(into.len()))
    }

    fn read_ahead(&mut self, _: Peer, _: &mut Link, _: usize) -> Moved {
        Moved::Bytes(0)
    }

    fn stage(&mut self, peer: Peer, _: &mut Link, done: usize, most: usize) -> Result<usize, Unreadable> {
        let Remote { process, address, staging, .. } = &mut self.peers[peer];
        if staging.len() < most {
            staging.resize(most, 0);
        }
        process.read(*address + done as u64, &mut staging[..most])?;
        Ok(most)
    }

    fn staged<'a>(&'a self, peer: Peer, _: &'a Link) -> &'a [u8] {
        &self.peers[peer].staging
    }

    fn consume(&mut self, _: Peer, _: &mut Link, _: usize) {}
}
