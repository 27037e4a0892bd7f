//! Headers: the next frame on a link, its check against the call, and the frames without data.

use super::Run;
use crate::cpu::link::{Ending, Link, Moved, NoHeader};
use crate::error::{Error, Result};
use crate::link::mesh::Peer;
use crate::link::wire::frame::{HEADER, Header, Kind};
use crate::paths::Path;
use crate::types::operation::Operation;

impl Run<'_> {
    /// Returns the header of the next message, if it has arrived. Acts on control frames before it.
    pub(super) fn next_header(&mut self, peer: Peer) -> Result<Option<Header>> {
        loop {
            let link = &mut self.links[peer];
            // Until an early message has arrived completely, the next bytes are the rest of it and not a header.
            if link.partial.is_some() && !link.continue_unexpected() {
                return if link.closed.is_some() { Err(self.lost(peer)) } else { Ok(None) };
            }
            if let Some(header) = link.header {
                if header.kind == Kind::Data {
                    return Ok(Some(header));
                }
                if link.buffered().len() < header.length {
                    return match link.fill(header.length) {
                        Moved::Bytes(_) => continue,
                        Moved::WouldBlock => Ok(None),
                        Moved::Closed => Err(self.lost(peer)),
                    };
                }
                self.control(peer, header)?;
                continue;
            }
            match link.parse_header() {
                Ok(Some(header)) => {
                    if header.kind != Kind::Goodbye && !header.fingerprint.operation.is_point_to_point() {
                        link.seen = link.seen.max(Some(header.sequence));
                    }
                    link.header = Some(header);
                    continue;
                }
                Ok(None) => {}
                Err(NoHeader) => return Err(self.corrupt(peer, "bytes that are no frame header")),
            }
            match link.fill(HEADER) {
                Moved::Bytes(_) => {}
                Moved::WouldBlock => return Ok(None),
                Moved::Closed if link.return_to_channel() => {}
                Moved::Closed => return Err(self.lost(peer)),
            }
        }
    }

    /// Returns true if the next bytes of the link are payload, so that there is no header to look for.
    pub(super) fn in_payload(&self, peer: Peer) -> bool {
        self.progress.peers[peer].open
    }

    pub(super) fn control(&mut self, peer: Peer, header: Header) -> Result<()> {
        if matches!(header.kind, Kind::Query | Kind::Answer) {
            self.compare(peer, &header)?;
        }
        let link = &mut self.links[peer];
        link.header = None;
        match header.kind {
            Kind::Data => unreachable!("data is not control"),
            Kind::Abort => {
                let reason = String::from_utf8_lossy(&link.buffered()[..header.length]).into_owned();
                link.consume(header.length);
                return Err(Error::PeerAborted { rank: header.rank, reason });
            }
            Kind::Query => {
                let answer = self.answer(&header);
                let link = &mut self.links[peer];
                link.queue_control(&answer, &[]);
                link.flush_control();
            }
            Kind::Answer => link.answered = true,
            Kind::Goodbye => link.goodbye = true,
        }
        Ok(())
    }

    /// Called before a send fails for good: reads the last frames of the peer, which may contain the reason for which it gave up.
    pub(super) fn read_abort_reason(&mut self, peer: Peer) -> Result<()> {
        let mut skip = 0;
        if self.in_payload(peer) {
            let node = self.compiled.receives[peer][self.progress.peers[peer].received].node;
            skip = self.length(node) - self.progress.done[node];
        }
        match self.read_past(peer, &mut skip) {
            Err(error @ (Error::PeerAborted { .. } | Error::Mismatch { .. })) => Err(error),
            _ => Ok(()),
        }
    }

    /// Checks links from which no message is expected at present: aborts, questions, deaths and mismatches arrive there.
    pub(super) fn listen(&mut self) -> Result<()> {
        for peer in self.links.ids() {
            let link = &mut self.links[peer];
            if link.has_control() {
                link.flush_control();
            }
            let has_left = link.closed.is_some() && link.goodbye;
            if has_left || self.in_payload(peer) {
                continue;
            }
            let expects = self.expects(peer);
            let has_all = !expects || self.progress.peers[peer].open;
            let header = match self.next_header(peer) {
                Ok(Some(header)) => header,
                Ok(None) => continue,
                Err(Error::PeerLost { .. }) if has_all && self.links[peer].goodbye => continue,
                Err(error) => return Err(error),
            };
            if matches!(header.fingerprint.operation, Operation::Send { .. }) {
                if !self.is_receiving_from(peer) {
                    let link = &mut self.links[peer];
                    link.header = None;
                    if !link.begin_unexpected(header) {
                        link.header = Some(header);
                    }
                }
            } else if !self.fingerprint.operation.is_point_to_point()
                && (header.sequence < self.sequence
                    || header.sequence == self.sequence
                        && (!expects || header.fingerprint != self.fingerprint))
            {
                self.check(peer, &header)?;
                return Err(self.corrupt(peer, "a message that its own schedule does not have"));
            }
        }
        Ok(())
    }

    /// Checks links whose next bytes wait for other ranks. A peer that has ended there is lost, whatever it has sent before.
    pub(super) fn look_behind_messages(&mut self) -> Result<()> {
        for peer in self.links.ids() {
            if !self.is_blocked(peer, &self.links[peer]) {
                continue;
            }
            let skip = if self.in_payload(peer) {
                let node = self.compiled.receives[peer][self.progress.peers[peer].received].node;
                self.length(node) - self.progress.done[node]
            } else {
                0
            };
            match self.links[peer].ending(skip) {
                None | Some(Ending::Goodbye) => {}
                Some(Ending::Abort { rank, reason }) => return Err(Error::PeerAborted { rank, reason }),
                Some(Ending::None) => return Err(self.lost(peer)),
            }
        }
        Ok(())
    }

    /// Sends queued control frames to peers. Returns `false` while some are left.
    pub(super) fn has_flushed(&mut self) -> bool {
        self.links.iter_mut().all(Link::flush)
    }

    pub(super) fn expects(&self, peer: Peer) -> bool {
        self.progress.peers[peer].received < self.compiled.receives[peer].len()
    }

    pub(super) fn is_receiving_from(&self, peer: Peer) -> bool {
        self.fingerprint.operation == Operation::Recv { from: self.links.rank(peer) }
    }

    /// Returns the path that the sender of this header takes.
    fn path_of(&self, header: &Header) -> Path {
        match self.context.doorbell {
            Some(doorbell) if doorbell.pipe().is_none() => Path::SharedMemory(header.algorithm),
            _ => Path::Tcp(header.algorithm),
        }
    }

    /// Compares a header with the current call of this rank.
    pub(super) fn check(&self, peer: Peer, header: &Header) -> Result<()> {
        if header.sequence < self.sequence && !self.fingerprint.operation.is_point_to_point() {
            self.compare(peer, header)?;
        }
        let from = self.name(peer);
        let mut mine = self.fingerprint;
        if let Operation::Recv { .. } = mine.operation {
            mine.operation = Operation::Send { to: self.context.rank };
        }
        if header.sequence == self.sequence && header.fingerprint == mine {
            let expected = self.header(header.length);
            if header.kind == Kind::Data && header.algorithm == expected.algorithm {
                return Ok(());
            }
            return Err(Error::Mismatch {
                group: self.context.group.into(),
                sequence: self.sequence,
                field: "path",
                rank: self.context.global_rank,
                mine: format!("{mine} by {}", self.path_of(&expected)),
                peer: from,
                theirs: format!("{} by {}", header.fingerprint, self.path_of(header)),
            });
        }
        if header.fingerprint == mine {
            return Err(Error::Mismatch {
                group: self.context.group.into(),
                sequence: self.sequence,
                field: "number of calls made before",
                rank: self.context.global_rank,
                mine: format!("{mine} as its call {}", self.sequence),
                peer: from,
                theirs: format!("it as its call {}", header.sequence),
            });
        }
        Err(Error::mismatch(
            self.context.group,
            self.sequence,
            (self.context.global_rank, &self.fingerprint),
            (from, &header.fingerprint),
        ))
    }
}
