//! Finds ranks whose calls differ although neither has received a message of the other that shows it.
//!
//! A rank that only sends in a call has left it before any other rank can object, and two roots may wait for each other. So every
//! rank remembers its calls. A header of an older call is compared with this rank's own call of that number. If nothing has
//! arrived, a rank asks: the peer compares the question with its own call of that number, and answers with that call.

use std::time::{Duration, Instant};

use super::Run;
use crate::cpu::link::Moved;
use crate::error::{Error, Result};
use crate::link::mesh::Peer;
use crate::link::wire::frame::{Header, Kind};
use crate::types::operation::CallFingerprint;

/// Time that a rank waits in a call before it asks the other ranks for their calls.
pub(super) const ASK_AFTER: Duration = Duration::from_millis(200);
/// Timeout for the answer of a rank that is ahead, which may be busy elsewhere.
const ANSWER: Duration = Duration::from_millis(800);
/// The newest collectives of this rank.
pub(in crate::cpu) type History = crate::types::history::History<CallFingerprint>;

impl Run<'_> {
    /// Compares a header with this rank's own call of the same number, if the rank remembers that call.
    pub(super) fn compare(&self, peer: Peer, header: &Header) -> Result<()> {
        if header.fingerprint.operation.is_point_to_point() {
            return Ok(());
        }
        match self.context.history.get(header.sequence) {
            Some(mine) if mine != header.fingerprint => Err(Error::mismatch(
                self.context.group,
                header.sequence,
                (self.context.global_rank, &mine),
                (self.name(peer), &header.fingerprint),
            )),
            _ => Ok(()),
        }
    }

    /// Returns the answer to a question: this rank's call of that number, or the current call if there is none.
    pub(super) fn answer(&self, question: &Header) -> Header {
        let present = Header { kind: Kind::Answer, ..self.header(0) };
        match self.context.history.get(question.sequence) {
            Some(fingerprint) => Header { fingerprint, sequence: question.sequence, ..present },
            None => present,
        }
    }

    /// Asks all peers for their calls.
    pub(super) fn ask(&mut self) {
        let question = Header { kind: Kind::Query, ..self.header(0) };
        for link in self.links.iter_mut().filter(|link| link.closed.is_none()) {
            link.answered = false;
            link.queue_control(&question, &[]);
            link.flush_control();
        }
    }

    /// Handles a peer that sends for a later call and never sent the message that this call needs: it called something else. Asks
    /// for that call; the answer follows everything that the peer has sent. If the peer does not answer in time, its current call
    /// takes the place of the answer.
    pub(super) fn error_of_peer_ahead(&mut self, peer: Peer, header: &Header) -> Error {
        let now = self.check(peer, header).err().unwrap_or_else(|| self.corrupt(peer, "a message too early"));
        self.ask();
        let until = Instant::now() + ANSWER;
        let mut skip = 0;
        loop {
            match self.read_past(peer, &mut skip) {
                Ok(()) => {}
                Err(Error::PeerLost { .. }) => return now,
                Err(error) => return error,
            }
            let has_answered = self.links[peer].answered;
            if has_answered || !self.wait(until).unwrap_or(false) {
                return now;
            }
        }
    }

    /// In a call that has failed: reads past messages, which no call needs any more, to the frames of the peer after them, as far
    /// as those have arrived. `skip` is the remaining length of the current message's payload.
    ///
    /// # Errors
    /// The error that the peer reported, or a mismatch with a message of another call; [`Error::PeerLost`] at the end of the link.
    pub(super) fn read_past(&mut self, peer: Peer, skip: &mut usize) -> Result<()> {
        loop {
            let link = &mut self.links[peer];
            if let Some(data) = link.header.take_if(|h| h.kind == Kind::Data) {
                *skip += data.length;
            }
            while *skip > 0 {
                let there = link.buffered().len().min(*skip);
                link.consume(there);
                *skip -= there;
                if *skip > 0 {
                    match link.fill(*skip) {
                        Moved::Bytes(_) => {}
                        Moved::WouldBlock => return Ok(()),
                        Moved::Closed => return Err(self.lost(peer)),
                    }
                }
            }
            match self.next_header(peer)? {
                Some(header) => self.compare(peer, &header)?,
                None => return Ok(()),
            }
        }
    }
}
