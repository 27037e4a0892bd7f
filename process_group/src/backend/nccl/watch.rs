//! The watcher of one communicator: hears of lost ranks, of errors NCCL found by itself and of calls that take too long,
//! and ends the communicator then, so that no kernel waits for ever.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::links::{Heard, Links, Word};
use super::shared::{IN_PROGRESS, Request, Shared, lock};
use crate::error::{Error, Result};
use crate::rank::Rank;

/// How often it looks by itself; what comes over a link wakes it at once.
const ROUND: Duration = Duration::from_millis(20);
/// How long the others have to say how far they have come.
const ANSWERS: Duration = Duration::from_millis(500);
/// A rank that has left in good order may have been quicker than this one by as much.
const STRAGGLE: Duration = Duration::from_secs(1);

pub(super) fn spawn(shared: &Arc<Shared>, links: Links) -> Result<JoinHandle<()>> {
    let n = shared.members.len();
    let mut watch = Watch { shared: Arc::clone(shared), links, progress: vec![None; n], left: vec![None; n] };
    std::thread::Builder::new()
        .name(format!("ryz-watch-{}", shared.group))
        .spawn(move || watch.run())
        .map_err(|e| Error::Transport(format!("cannot start the group's watching thread: {e}")))
}

struct Watch {
    shared: Arc<Shared>,
    links: Links,
    /// How many collectives each member says it has enqueued.
    progress: Vec<Option<u64>>,
    /// When a member said goodbye.
    left: Vec<Option<Instant>>,
}

impl Watch {
    fn run(&mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            self.hear(ROUND);
            if self.shared.has_failed() {
                continue;
            }
            let request = lock(&self.shared.request).take();
            match request {
                Some(Request::Abort(why)) => self.give_up(why, true),
                Some(Request::Expire { what, waited, sequence }) => {
                    self.expire(what, waited, sequence, None);
                }
                None => self.look(),
            }
        }
        self.links.tell_all(&Word::Goodbye);
    }

    /// Looks at what nobody tells.
    fn look(&mut self) {
        if let Some(error) = self.asynchronous_error() {
            return self.give_up(error, true);
        }
        let now = Instant::now();
        let late = {
            let mut flights = lock(&self.shared.flights);
            if let Err(error) = flights.land() {
                drop(flights);
                return self.give_up(error.into(), true);
            }
            flights.oldest().map(|f| (f.signature, f.sequence, f.enqueued, f.deadline))
        };
        let Some((signature, sequence, enqueued, deadline)) = late else { return };
        if now >= deadline {
            let what = format!("call {sequence} of group `{}`, {signature},", self.shared.group);
            let peer = match signature.operation {
                crate::Operation::Send { to } => Some(to),
                crate::Operation::Recv { from } => Some(from),
                _ => None,
            };
            return self.expire(what, now - enqueued, sequence, peer);
        }
        let gone = self.left.iter().position(|l| l.is_some_and(|at| now - at > STRAGGLE));
        if let Some(position) = gone.filter(|_| now - enqueued > STRAGGLE) {
            let error = self.lost(position, "it has left the group", &signature.to_string());
            self.give_up(error, true);
        }
    }

    fn asynchronous_error(&self) -> Option<Error> {
        // A caller who holds it is inside NCCL and sees errors itself.
        let communicator = self.shared.communicator.try_lock().ok()?;
        let handle = (*communicator)?;
        let mut state = 0;
        // SAFETY: the communicator lives while it is locked; the pointer is to a live integer.
        let code = unsafe { (self.shared.nccl.ncclCommGetAsyncError)(handle, &raw mut state) };
        let code = if code == 0 { state } else { code };
        (code != 0 && code != IN_PROGRESS).then(|| self.shared.error("an operation under way", code, handle))
    }

    fn hear(&mut self, patience: Duration) {
        let words = self.links.listen(patience);
        // All of it first: what is done about one word may need what another says.
        for (position, heard) in &words {
            if let Heard::Said(Word::Progress(sequence) | Word::Expired(sequence, _)) = heard {
                self.progress[*position] = Some(*sequence);
            }
        }
        for (position, heard) in words {
            match heard {
                Heard::Said(Word::Goodbye) => self.left[position] = Some(Instant::now()),
                Heard::Said(Word::Progress(_)) => {}
                _ if self.shared.has_failed() || self.shared.stop.load(Ordering::Acquire) => {}
                Heard::Said(Word::Aborted(reason)) => {
                    let rank = self.shared.members[position].rank;
                    self.give_up(Error::PeerAborted { rank, reason }, false);
                }
                Heard::Said(Word::Expired(sequence, what)) => self.answer(position, sequence, &what),
                Heard::Lost(why) => {
                    let during = self.during();
                    let error = self.lost(position, &why, &during);
                    self.give_up(error, true);
                }
            }
        }
    }

    fn during(&self) -> String {
        let flights = lock(&self.shared.flights);
        flights.oldest().map_or_else(|| "no call".into(), |f| f.signature.to_string())
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
        let mine = self.shared.sequence.load(Ordering::Acquire);
        self.progress[self.shared.position] = Some(mine);
        self.links.tell_all(&Word::Progress(mine));
        let until = Instant::now() + ANSWERS;
        while self.progress.iter().any(Option::is_none) && Instant::now() < until {
            // Only progress counts here: whatever else is said, this group is given up already.
            for (position, heard) in self.links.listen(ROUND) {
                match heard {
                    Heard::Said(Word::Progress(n) | Word::Expired(n, _)) => self.progress[position] = Some(n),
                    // Whoever gives up has been there.
                    Heard::Said(Word::Aborted(_)) => self.progress[position] = Some(sequence),
                    Heard::Said(Word::Goodbye) | Heard::Lost(_) => {}
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
        // Callers inside NCCL leave as soon as they see the failure.
        let handle = lock(&self.shared.communicator).take();
        if let Some(handle) = handle {
            self.shared.retire(handle, false);
        }
    }
}
