//! Headers: what comes next on a link, whether it fits the call, and the frames that are no data.

use super::Run;
use crate::backend::Path;
use crate::backend::tcp::link::Moved;
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::rank::Rank;
use crate::schedule::Algorithm;
use crate::wire::frame::{Header, Kind};

impl Run<'_> {
    /// The next message's header, if it is there. Acts on control frames before it.
    pub(super) fn next_header(&mut self, peer: usize) -> Result<Option<Header>> {
        loop {
            let link = self.links[peer].as_mut().expect("only links are read");
            // Until a message that came early is there whole, what comes next is the rest of it and no header.
            if link.partial.is_some() && !link.continue_letter() {
                return if link.closed.is_some() { Err(self.lost(peer)) } else { Ok(None) };
            }
            let offered = link.offers.front().copied();
            if let Some(header) = link.header {
                if header.kind == Kind::Data {
                    return Ok(offered.or(Some(header)));
                }
                if link.buffered().len() < header.following() {
                    return match link.fill() {
                        Moved::Bytes(_) => continue,
                        Moved::WouldBlock => Ok(offered),
                        Moved::Closed => Err(self.lost(peer)),
                    };
                }
                self.control(peer, header)?;
                continue;
            }
            match link.parse_header() {
                Ok(Some(header)) => {
                    if header.kind != Kind::Goodbye && !header.signature.operation.is_point_to_point() {
                        link.seen = link.seen.max(Some(header.sequence));
                    }
                    link.header = Some(header);
                    continue;
                }
                Ok(None) => {}
                Err(()) => return Err(self.corrupt(peer, "bytes that are no frame header")),
            }
            match link.fill() {
                Moved::Bytes(_) => {}
                Moved::WouldBlock => return Ok(offered),
                Moved::Closed => return Err(self.lost(peer)),
            }
        }
    }

    /// Whether the link's next bytes are payload, so that no header can be looked for.
    pub(super) fn in_payload(&self, peer: usize) -> bool {
        self.progress.open[peer] && !self.by_reference
    }

    pub(super) fn control(&mut self, peer: usize, header: Header) -> Result<()> {
        if matches!(header.kind, Kind::Query | Kind::Answer) {
            self.compare(peer, &header)?;
        }
        let link = self.links[peer].as_mut().expect("only links are read");
        link.header = None;
        match header.kind {
            Kind::Data => unreachable!("data is not control"),
            Kind::Offer => link.offers.push_back(header),
            Kind::Taken => self.taken(peer, &header)?,
            Kind::Abort => {
                let reason = String::from_utf8_lossy(&link.buffered()[..header.length]).into_owned();
                link.consume(header.length);
                return Err(Error::PeerAborted { rank: header.rank, reason });
            }
            Kind::Query => {
                let answer = self.answer(&header);
                let link = self.links[peer].as_mut().expect("only links are read");
                link.queue_control(&answer, &[]);
                link.flush_control();
            }
            Kind::Answer => link.answered = true,
            Kind::Goodbye => link.goodbye = true,
        }
        Ok(())
    }

    /// Before a send fails for good: reads what the peer said last, which may be the reason.
    pub(super) fn drain_last_words(&mut self, peer: usize) -> Result<()> {
        let mut skip = 0;
        if self.in_payload(peer) {
            let node = self.compiled.receives[peer][self.progress.received[peer]];
            skip = self.length(node) - self.progress.done[node];
        }
        match self.read_past(peer, &mut skip) {
            Err(error @ (Error::PeerAborted { .. } | Error::Mismatch { .. })) => Err(error),
            _ => Ok(()),
        }
    }

    /// Looks at links from which nothing is expected just now: aborts, questions, deaths and mismatches come there.
    pub(super) fn listen(&mut self) -> Result<()> {
        for peer in 0..self.links.len() {
            let Some(link) = self.links[peer].as_mut() else { continue };
            if link.has_control() {
                link.flush_control();
            }
            let has_left = link.closed.is_some() && link.goodbye;
            if has_left || self.in_payload(peer) {
                continue;
            }
            let expects = self.expects(peer);
            let header = match self.next_header(peer) {
                Ok(Some(header)) => header,
                Ok(None) => continue,
                Err(Error::PeerLost { .. }) if !expects && self.said_goodbye(peer) => continue,
                Err(error) => return Err(error),
            };
            if matches!(header.signature.operation, Operation::Send { .. }) {
                if !self.is_receiving_from(peer) {
                    let link = self.links[peer].as_mut().expect("looked at above");
                    link.header = None;
                    if !link.begin_letter(header) {
                        link.header = Some(header);
                    }
                }
            } else if !self.signature.operation.is_point_to_point()
                && (header.sequence < self.sequence
                    || header.sequence == self.sequence && (!expects || header.signature != self.signature))
            {
                self.check(peer, &header)?;
                return Err(self.corrupt(peer, "a message that its own schedule does not have"));
            }
        }
        Ok(())
    }

    pub(super) fn said_goodbye(&self, peer: usize) -> bool {
        self.links[peer].as_ref().is_some_and(|l| l.goodbye)
    }

    pub(super) fn expects(&self, peer: usize) -> bool {
        self.progress.received[peer] < self.compiled.receives[peer].len()
    }

    pub(super) fn is_receiving_from(&self, peer: usize) -> bool {
        self.signature.operation == Operation::Recv { from: Rank(peer as u32) }
    }

    /// Compares a header with what this rank is doing.
    pub(super) fn check(&self, peer: usize, header: &Header) -> Result<()> {
        if header.sequence < self.sequence && !self.signature.operation.is_point_to_point() {
            self.compare(peer, header)?;
        }
        let from = self.name(peer);
        let mut mine = self.signature;
        if let Operation::Recv { .. } = mine.operation {
            mine.operation = Operation::Send { to: self.context.rank };
        }
        if header.sequence == self.sequence && header.signature == mine {
            let by_reference = header.kind == Kind::Offer;
            if header.algorithm == self.compiled.shape.algorithm && by_reference == self.by_reference {
                return Ok(());
            }
            let way = |by_reference: bool, algorithm: Algorithm| {
                if by_reference { Path::CrossMemory } else { Path::Tcp(algorithm) }
            };
            return Err(Error::Mismatch {
                group: self.context.group.into(),
                sequence: self.sequence,
                field: "path",
                rank: self.context.name,
                mine: format!("{mine} by {}", way(self.by_reference, self.compiled.shape.algorithm)),
                peer: from,
                theirs: format!("{} by {}", header.signature, way(by_reference, header.algorithm)),
            });
        }
        if header.signature == mine {
            return Err(Error::Mismatch {
                group: self.context.group.into(),
                sequence: self.sequence,
                field: "number of calls made before",
                rank: self.context.name,
                mine: format!("{mine} as its call {}", self.sequence),
                peer: from,
                theirs: format!("it as its call {}", header.sequence),
            });
        }
        Err(Error::mismatch(
            self.context.group,
            self.sequence,
            (self.context.name, &self.signature),
            (from, &header.signature),
        ))
    }
}
