//! The watcher of one communicator: hears of lost ranks, of errors NCCL found by itself and of calls that take too long,
//! and ends the communicator then, so that no kernel waits for ever.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::ledger::Finding;
use super::links::{Heard, Links, MOST_CALLS, Word};
use super::messages::{Unmatched, peer};
use super::shared::{HEARD, Request, Shared, lock};
use super::timings::Awaited;
use crate::device::{DeviceError, Event};
use crate::error::{Error, Result};
use crate::operation::Signature;
use crate::rank::Rank;

/// How often it looks by itself; what comes over a link wakes it at once.
const ROUND: Duration = Duration::from_millis(20);
/// How long the others have to say how far they have come.
const ANSWERS: Duration = Duration::from_millis(500);
/// How long a message that nobody receives may be under way: NCCL takes short ones, with what was enqueued before them.
const TAKEN: Duration = Duration::from_secs(1);
/// How long the end of a link waits for the other's.
const FAREWELL: Duration = Duration::from_millis(100);

pub(super) fn spawn(shared: &Arc<Shared>, links: Links) -> Result<JoinHandle<()>> {
    let n = shared.members.len();
    let watch = Watch { shared: Arc::clone(shared), links, progress: vec![None; n], late_mark: None };
    std::thread::Builder::new()
        .name(format!("ryz-watch-{}", shared.group))
        .spawn(move || watch.run())
        .map_err(|e| Error::Transport(format!("cannot start the group's watching thread: {e}")))
}

fn several() -> String {
    "several calls".into()
}

struct Watch {
    shared: Arc<Shared>,
    links: Links,
    /// How many collectives each member says it has enqueued.
    progress: Vec<Option<u64>>,
    /// The call behind which a mark is being put, and the mark.
    late_mark: Option<Receiver<LateMark>>,
}

type LateMark = (u64, Result<Event, DeviceError>);

/// Puts a mark behind call number `calls`, from a thread that the GPU may hold up.
fn mark_late(shared: &Arc<Shared>, calls: u64) -> Option<Receiver<LateMark>> {
    let (sender, mark) = std::sync::mpsc::channel();
    let stream = shared.device.stream().clone();
    let put = move || {
        let Ok(event) = Event::new(&stream, false) else { return };
        let mut outcome = None;
        let _ = stream.unless_capturing(|| {
            outcome = Some(event.record(&stream));
            Ok(())
        });
        // Not while it is captured: the next round tries again.
        let Some(outcome) = outcome else { return };
        let _ = sender.send((calls, outcome.map(|()| event)));
    };
    std::thread::Builder::new().name("ryz-mark".into()).spawn(put).ok().map(|_| mark)
}

impl Watch {
    fn run(mut self) {
        // Who waits for others to make the communicator hears that this one is there.
        self.links.tell_all(&Word::Hello);
        let mut next_look = Instant::now();
        let mut is_last_told = false;
        while !self.shared.stop.load(Ordering::Acquire) {
            self.hear(next_look.saturating_duration_since(Instant::now()));
            // However much is said, nobody is looked at more often than that.
            let now = Instant::now();
            let is_due = now >= next_look;
            if is_due {
                next_look = now + ROUND;
            }
            if !is_last_told && self.shared.leaves.load(Ordering::Acquire) {
                is_last_told = true;
                self.tell_last();
            }
            if self.shared.has_failed() {
                continue;
            }
            if !self.does_as_requested() && is_due {
                self.look(now);
            }
        }
        if !self.shared.has_failed() {
            self.does_as_requested();
        }
        if !is_last_told {
            self.tell_last();
        }
        self.links.tell_all(&Word::Goodbye);
        self.links.close(FAREWELL);
    }

    /// Gives up, if a caller has asked for that.
    fn does_as_requested(&mut self) -> bool {
        // It stays where it is: whoever closes the communicator waits until it has been done.
        let request = lock(&self.shared.request).clone();
        match request {
            Some(Request::Abort(why)) => self.give_up(why, true),
            Some(Request::Expire { what, waited, sequence, peer }) => {
                self.expire(what, waited, sequence, peer);
            }
            None => return false,
        }
        true
    }

    /// Tells the others which collectives of this rank may not have been compared, how many there are, how many messages there
    /// have been with each of them, and that there will be no more.
    fn tell_last(&mut self) {
        let (made, (first, calls)) = {
            let comparison = lock(&self.shared.comparison);
            let ledger = lock(&self.shared.ledger);
            (ledger.newest(), comparison.parting(&ledger, self.shared.position))
        };
        self.tell_calls(first, &calls);
        for position in (0..self.shared.members.len()).filter(|position| *position != self.shared.position) {
            let exchange = lock(&self.shared.messages).with(position);
            self.links.tell(position, &Word::Exchanged(exchange));
        }
        self.links.tell_all(&Word::Last(made));
    }

    fn tell_calls(&mut self, first: u64, calls: &[Signature]) {
        for (index, calls) in calls.chunks(MOST_CALLS).enumerate() {
            let first = first + (index * MOST_CALLS) as u64;
            self.links.tell_all(&Word::Calls(first, calls.to_vec()));
        }
    }

    /// Looks at what nobody tells.
    fn look(&mut self, now: Instant) {
        // First: calls that differ, or a rank that has left, may be why NCCL fails.
        if self.compare(now) || self.misses_collective() || self.misses_message(now) {
            return;
        }
        if let Some(error) = self.shared.asynchronous_error() {
            return self.give_up(error, true);
        }
        if self.is_late_inside(now) {
            return;
        }
        if let Err(error) = self.land(now) {
            return self.give_up(error.into(), true);
        }
        let oldest = self.shared.oldest();
        if let Some(first) = oldest.first().filter(|first| now >= first.deadline) {
            let Awaited { signature, sequence, collectives, enqueued, .. } = *first;
            let peer = signature.as_ref().and_then(peer);
            self.expire(self.words(signature, sequence), now - enqueued, collectives, peer);
        }
    }

    /// Whether a member that exchanges no more messages lacks one that this rank waits for; then the group is given up.
    fn misses_message(&mut self, now: Instant) -> bool {
        let unmatched = lock(&self.shared.messages).unmatched();
        if unmatched.is_empty() {
            return false;
        }
        // What has ended waits for nobody. An error is told by who lands next.
        for flights in &self.shared.flights {
            let _ = flights.try_lock().map(|mut flights| flights.land());
        }
        let inside = lock(&self.shared.calls).inside.map(|inside| (inside.peers, inside.since));
        let oldest = self.shared.oldest();
        let awaited: Vec<_> = oldest.iter().map(|a| (a.peers, a.enqueued)).chain(inside).collect();
        let is_awaited = |unmatched: &&Unmatched| {
            awaited.iter().any(|(peers, since)| {
                let is_stuck = unmatched.sends || now.saturating_duration_since(*since) > TAKEN;
                unmatched.is_among(*peers) && is_stuck
            })
        };
        let Some(unmatched) = unmatched.iter().find(is_awaited) else { return false };
        self.give_up_lost(unmatched.position, &format!("it has left the group {unmatched}"));
        true
    }

    /// Whether a member that makes no more calls has not made one that this rank has; then the group is given up.
    fn misses_collective(&mut self) -> bool {
        let made = self.shared.collectives();
        let Some((position, last)) = lock(&self.shared.comparison).short_of(made) else { return false };
        let number = last + 1;
        let call =
            lock(&self.shared.ledger).call(number).map_or_else(String::new, |call| format!(", {call}"));
        self.give_up_lost(position, &format!("it has left the group without call {number}{call}"));
        true
    }

    fn give_up_lost(&mut self, position: usize, detail: &str) {
        let error = self.lost(position, detail, &self.during());
        self.give_up(error, true);
    }

    /// Whether a member has called something else than this rank; then the group is given up, now or when it is known what.
    fn compare(&mut self, now: Instant) -> bool {
        let (found, differs) = {
            let mut comparison = lock(&self.shared.comparison);
            (comparison.compare(&lock(&self.shared.ledger), now, ANSWERS), comparison.is_disputed())
        };
        for finding in found {
            match finding {
                Finding::News(claim) => self.links.tell_all(&Word::Made(claim)),
                Finding::Dispute(first, calls) => self.tell_calls(first, &calls),
                Finding::Different(position, difference) => self.mismatch(position, difference),
                Finding::Unknown(position, sequence) => {
                    let error = Error::Mismatch {
                        group: self.shared.group.clone(),
                        sequence,
                        field: "a call that is not known any more",
                        rank: self.shared.members[self.shared.position].rank,
                        mine: "these up to it".into(),
                        peer: self.shared.members[position].rank,
                        theirs: "others".into(),
                    };
                    self.give_up(error, true);
                }
            }
        }
        differs || self.shared.has_failed()
    }

    /// Compares another member's calls with this rank's.
    fn contrast(&mut self, position: usize, first: u64, theirs: &[Signature]) {
        let difference = lock(&self.shared.ledger).difference(first, theirs);
        if let Some(difference) = difference {
            self.mismatch(position, difference);
        }
    }

    fn mismatch(&mut self, position: usize, (sequence, mine, theirs): (u64, Signature, Signature)) {
        let [me, peer] = [self.shared.position, position].map(|position| self.shared.members[position].rank);
        self.give_up(Error::mismatch(&self.shared.group, sequence, (me, &mine), (peer, &theirs)), true);
    }

    /// Finds out which calls are done. Only asks: what enqueues can be held up by the GPU.
    fn land(&mut self, now: Instant) -> Result<(), DeviceError> {
        let shared = Arc::clone(&self.shared);
        for flights in &shared.flights {
            if let Ok(mut flights) = flights.try_lock() {
                flights.land()?;
            }
        }
        let Ok(mut flights) = shared.flights[0].try_lock() else { return Ok(()) };
        match self.late_mark.as_ref().map(Receiver::try_recv) {
            Some(Err(TryRecvError::Empty)) => return Ok(()),
            Some(Ok((calls, mark))) => flights.marked_late(calls, mark?, now),
            Some(Err(TryRecvError::Disconnected)) | None => {}
        }
        self.late_mark = flights.lacks_mark(now).and_then(|calls| mark_late(&shared, calls));
        Ok(())
    }

    fn words(&self, signature: Option<Signature>, sequence: u64) -> String {
        let call = signature.map_or_else(several, |s| s.to_string());
        format!("call {sequence} of group `{}`, {call},", self.shared.group)
    }

    /// Whether a caller has not come out of NCCL or the driver by its deadline; then the group is given up.
    fn is_late_inside(&mut self, now: Instant) -> bool {
        let Some(inside) = lock(&self.shared.calls).inside.filter(|inside| now >= inside.deadline) else {
            return false;
        };
        let sequence = self.shared.collectives();
        let what = self.words(inside.signature, sequence) + " inside NCCL,";
        self.expire(what, now - inside.since, sequence, inside.signature.as_ref().and_then(peer));
        true
    }

    fn hear(&mut self, patience: Duration) {
        let words = self.links.listen(patience);
        // All of it first: what is done about one word may need what another says.
        for (position, heard) in &words {
            if let Heard::Said(_) = heard {
                self.shared.heard_from(*position);
            }
            if let Heard::Said(Word::Progress(n) | Word::Expired(n, _)) = heard {
                self.progress[*position] = Some(*n);
            }
            if let Heard::Said(Word::Last(claim)) = heard {
                lock(&self.shared.comparison).ended(*position, *claim);
                self.progress[*position] = Some(claim.sequence);
            }
        }
        for (position, heard) in words {
            match heard {
                Heard::Said(Word::Hello | Word::Progress(_) | Word::Last(_) | Word::Goodbye) => {}
                Heard::Said(Word::Exchanged(exchange)) => {
                    lock(&self.shared.messages).ended(position, exchange);
                }
                Heard::Said(Word::Made(claim)) => lock(&self.shared.comparison).claimed(position, claim),
                _ if self.shared.has_failed() || self.shared.stop.load(Ordering::Acquire) => {}
                Heard::Said(Word::Aborted(reason)) => {
                    let rank = self.shared.members[position].rank;
                    self.give_up(Error::PeerAborted { rank, reason }, false);
                }
                Heard::Said(Word::Expired(sequence, what)) => self.answer(position, sequence, &what),
                Heard::Said(Word::Calls(first, calls)) => {
                    self.contrast(position, first, &calls);
                    lock(&self.shared.comparison).heard(position, first, &calls);
                }
                Heard::Lost(why) => self.give_up_lost(position, &why),
            }
        }
    }

    /// What the caller is in, or else what it has enqueued and waits for.
    fn during(&self) -> String {
        let inside = lock(&self.shared.calls).inside.map(|inside| inside.signature);
        let under_way = inside.or_else(|| self.shared.oldest().first().map(|awaited| awaited.signature));
        let words = |signature: Option<Signature>| signature.map_or_else(several, |s| s.to_string());
        under_way.map_or_else(|| "no call".into(), words)
    }

    fn lost(&self, position: usize, detail: &str, during: &str) -> Error {
        let member = &self.shared.members[position];
        Error::PeerLost {
            rank: member.rank,
            host: member.host.clone(),
            pid: member.pid,
            during: during.into(),
            detail: detail.into(),
        }
    }

    /// This rank's own call has come to its deadline.
    fn expire(&mut self, what: String, waited: Duration, sequence: u64, peer: Option<Rank>) {
        self.links.tell_all(&Word::Expired(sequence, format!("{what} timed out after {waited:.1?}")));
        let missing = match peer {
            Some(peer) => vec![self.shared.members[peer.index()].rank],
            None => self.missing(sequence),
        };
        self.give_up(Error::Timeout { what, waited, missing }, false);
    }

    /// Another rank's call has.
    fn answer(&mut self, position: usize, sequence: u64, what: &str) {
        let missing = self.missing(sequence);
        let names = match missing.as_slice() {
            [] => "every rank is there, but not finished".into(),
            [one] => format!("rank {one} is not there"),
            many => format!("ranks {} are not there", crate::rank::list(many)),
        };
        let rank = self.shared.members[position].rank;
        self.give_up(Error::PeerAborted { rank, reason: format!("{what}: {names}") }, false);
    }

    /// Tells the others how far this rank is, hears how far they are, and names those that have not come to `sequence`.
    fn missing(&mut self, sequence: u64) -> Vec<Rank> {
        let mine = self.shared.collectives();
        self.progress[self.shared.position] = Some(mine);
        self.links.tell_all(&Word::Progress(mine));
        let until = Instant::now() + ANSWERS;
        while self.progress.iter().any(Option::is_none) && Instant::now() < until {
            // Only progress counts here: whatever else is said, this group is given up already.
            for (position, heard) in self.links.listen(ROUND) {
                match heard {
                    Heard::Said(Word::Progress(n) | Word::Expired(n, _)) => self.progress[position] = Some(n),
                    Heard::Said(Word::Last(claim)) => self.progress[position] = Some(claim.sequence),
                    // Whoever gives up has been there.
                    Heard::Said(Word::Aborted(_)) => self.progress[position] = Some(sequence),
                    Heard::Said(
                        Word::Hello | Word::Made(_) | Word::Calls(..) | Word::Exchanged(_) | Word::Goodbye,
                    )
                    | Heard::Lost(_) => {}
                }
            }
        }
        self.shared
            .members
            .iter()
            .zip(&self.progress)
            .filter(|(_, p)| p.is_none_or(|p| p < sequence))
            .map(|(m, _)| m.rank)
            .collect()
    }

    /// Makes this the group's failure, tells the others, and ends the communicator.
    fn give_up(&mut self, error: Error, tell: bool) {
        if tell {
            self.links.tell_all(&Word::Aborted(error.to_string()));
        }
        tracing::debug!(group = self.shared.group, %error, "a communicator is given up");
        if !self.shared.fail(error) {
            return;
        }
        std::thread::sleep(HEARD);
        self.shared.retire();
    }
}
