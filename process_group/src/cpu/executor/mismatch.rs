//! Who called what: finding ranks whose calls differ although neither got a message of the other's that shows it.
//!
//! A rank that only sends in a call has left it before anybody can object, and two roots may wait for each other. So every
//! rank remembers its calls. A header of an older call is compared with this rank's own call of that number. Where
//! nothing came, a rank asks: who is asked compares the question with its own call of that number, and answers with it.

use std::time::{Duration, Instant};

use super::Run;
use crate::cpu::link::Moved;
use crate::error::{Error, Result};
use crate::link::mesh::Peer;
use crate::link::wire::frame::{Header, Kind};
use crate::types::operation::CallFingerprint;

/// How long a rank waits in a call before it asks the others what they called.
pub(super) const ASK_AFTER: Duration = Duration::from_millis(200);
/// How long it waits for the answer of a rank that is ahead of it, which may be busy elsewhere.
const ANSWER: Duration = Duration::from_millis(800);
/// This rank's newest collectives.
pub(in crate::cpu) type History = crate::types::history::History<CallFingerprint>;

impl Run<'_> {
    /// Compares a header with this rank's own call of the same number, if that is remembered.
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

    /// What to answer to a question: this rank's call of that number; the present one if there is none.
    pub(super) fn answer(&self, question: &Header) -> Header {
        let present = Header { kind: Kind::Answer, ..self.header(0) };
        match self.context.history.get(question.sequence) {
            Some(fingerprint) => Header { fingerprint, sequence: question.sequence, ..present },
            None => present,
        }
    }

    /// Asks everybody what they called.
    pub(super) fn ask(&mut self) {
        let question = Header { kind: Kind::Query, ..self.header(0) };
        for link in self.links.iter_mut().filter(|link| link.closed.is_none()) {
            link.answered = false;
            link.queue_control(&question, &[]);
            link.flush_control();
        }
    }

    /// A peer sends for a later call and never sent what this one needs: it called something else. Asks what; the answer
    /// is behind all that the peer has sent. What it calls now has to do if it does not answer in time.
    pub(super) fn overtaken(&mut self, peer: Peer, header: &Header) -> Error {
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

    /// In a call that has failed: reads past messages, which nobody needs any more, to what the peer said after them, as
    /// far as it is there. `skip` is what is left of the present message's payload.
    ///
    /// # Errors
    /// What the peer said, or a message of a call that differs; [`Error::PeerLost`] at the end of the link.
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
