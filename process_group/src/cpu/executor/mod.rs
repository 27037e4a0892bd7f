//! Executes one rank's program over its links: moves all bytes that can move, and waits when none can.

mod control;
mod failure;
mod liveness_check;
mod mismatch;
mod receive;
mod reduce;
mod wait;

pub(super) use mismatch::History;

use std::time::{Duration, Instant};

use super::SEGMENT;
use super::compiled::{Compiled, Copy, Send};
use super::link::{Link, Sent};
use super::shared::Doorbell;
use super::spin::{COMPARE_AFTER, SpinPolicy, leave_processor};
use crate::backend::call::Interrupt;
use crate::error::Result;
use crate::link::mesh::{Liveness, Peer, Peers};
use crate::link::wire::frame::{Header, Kind};
use crate::schedule::program::{Region, Space};
use crate::types::operation::CallFingerprint;
use crate::types::rank::Rank;
use liveness_check::LivenessCheck;

/// The memories of a call, as bytes.
pub(super) struct Spaces<'a> {
    pub(super) input: Option<&'a [u8]>,
    pub(super) output: &'a mut [u8],
    pub(super) scratch: &'a mut [u8],
}

impl Spaces<'_> {
    fn read(&self, region: Region, size: usize, from: usize, to: usize) -> &[u8] {
        let all: &[u8] = match region.space {
            Space::Input => self.input.unwrap_or(&*self.output),
            Space::Output => &*self.output,
            Space::Scratch => &*self.scratch,
        };
        &all[region.start * size + from..region.start * size + to]
    }

    fn write(&mut self, region: Region, size: usize, from: usize, to: usize) -> &mut [u8] {
        let all = if region.space == Space::Scratch { &mut *self.scratch } else { &mut *self.output };
        &mut all[region.start * size + from..region.start * size + to]
    }
}

/// Properties that all calls of a group share.
pub(super) struct Context<'a> {
    pub(super) group: &'a str,
    /// Position in the group.
    pub(super) rank: Rank,
    /// Global rank, for errors.
    pub(super) global_rank: Rank,
    pub(super) spin: SpinPolicy,
    /// The doorbell that wakes this rank, where links go through memory.
    pub(super) doorbell: Option<&'a Doorbell>,
    /// This call and the previous ones.
    pub(super) history: &'a History,
    /// Checks whether the peers' processes respond, where they are processes.
    pub(super) liveness: Option<&'a Liveness>,
    /// Ends the call from another thread.
    pub(super) interrupt: Option<&'a Interrupt>,
}

/// A peer that was silent for longer than this had not entered the call yet.
const ABSENT_AFTER: Duration = Duration::from_millis(2);

/// Interval at which a rank that waits looks for peers that have ended behind a message that waits for others.
const LOOK_BEHIND_EVERY: Duration = Duration::from_millis(20);

/// Progress of a call. Kept between calls to save its allocations.
#[derive(Debug)]
pub(super) struct Progress {
    /// Number of bytes done, for each node.
    done: Vec<usize>,
    peers: Peers<PeerProgress>,
    copied: usize,
    /// Number of unfinished nodes.
    left: usize,
    waited: Duration,
    /// Time of the last check of sockets that carry no bytes.
    looked: Instant,
}

/// Progress of the messages to and from one peer.
#[derive(Clone, Copy, Default, Debug)]
struct PeerProgress {
    /// Number of messages sent.
    sent: usize,
    /// Number of messages received.
    received: usize,
    /// True if the header of the following message has been read.
    open: bool,
    /// True if the link accepts no more bytes at present.
    full: bool,
}

impl Progress {
    pub(super) fn new(rank: usize, world_size: usize) -> Self {
        let peers = Peers::from_fn(rank, world_size, |_| PeerProgress::default());
        Self { done: Vec::new(), peers, copied: 0, left: 0, waited: Duration::ZERO, looked: Instant::now() }
    }

    /// Returns the time for which the call waited for other ranks.
    pub(super) fn waited(&self) -> Duration {
        self.waited
    }

    fn reset(&mut self, nodes: usize) {
        self.waited = Duration::ZERO;
        self.done.clear();
        self.done.resize(nodes, 0);
        self.peers.iter_mut().for_each(|peer| *peer = PeerProgress::default());
        self.copied = 0;
        self.left = nodes;
    }
}

/// One call of one rank.
pub(super) struct Run<'a> {
    pub(super) context: Context<'a>,
    pub(super) links: &'a mut Peers<Link>,
    pub(super) compiled: &'a Compiled,
    pub(super) fingerprint: CallFingerprint,
    pub(super) sequence: u64,
    pub(super) deadline: Instant,
    pub(super) spaces: Spaces<'a>,
    pub(super) progress: &'a mut Progress,
}

impl Run<'_> {
    /// Executes the whole program.
    pub(super) fn run(mut self) -> Result<()> {
        let started = Instant::now();
        self.progress.reset(self.compiled.lengths.len());
        // A call that only sends does not wait.
        self.look_at_channels(started);
        let mut idle_since = started;
        let (mut looks, mut shares_processor) = (0u32, false);
        let mut asleep_since = None;
        let may_ask = !self.fingerprint.operation.is_point_to_point();
        let mut ask_at = may_ask.then(|| started + mismatch::ASK_AFTER);
        let mut look_behind_at = started + LOOK_BEHIND_EVERY;
        let (mut look_at, mut liveness_check) =
            (started + liveness_check::LOOK_AFTER, LivenessCheck::default());
        if self.context.spin.yields && self.compiled.yields_first {
            // Some of the ranks that this rank waits for may share its processor, and enter the call only when it yields: looking
            // before that is useless.
            self.give()?;
            std::thread::yield_now();
        }
        loop {
            let moved = self.step()?;
            if moved && let Some(since) = asleep_since.take() {
                self.note_silence(since);
            }
            if self.progress.left == 0 && self.has_flushed() {
                return Ok(());
            }
            if moved {
                looks = 0;
                continue;
            }
            // The clock is read only after a look without news, not before every look at a socket.
            if looks == 0 {
                idle_since = Instant::now();
                shares_processor = false;
            }
            looks += 1;
            if looks == COMPARE_AFTER {
                shares_processor = self.shares_processor();
            }
            let until = ask_at.unwrap_or(look_at).min(look_at).min(look_behind_at).min(self.deadline);
            if self.context.spin.look_again(idle_since, until, shares_processor) {
                // A peer from which no message is expected may send a control frame.
                if looks.is_multiple_of(64) {
                    self.look_at_channels(Instant::now());
                    self.listen()?;
                }
                continue;
            }
            asleep_since.get_or_insert(idle_since);
            if !self.sleep(until)? {
                if until == self.deadline {
                    let missing = self.missing();
                    return Err(self.timeout(&liveness_check, started.elapsed(), missing));
                }
                if ask_at.take_if(|at| *at <= until).is_some() {
                    self.ask();
                }
                if look_at <= until {
                    look_at = Instant::now() + liveness_check::LOOK_EVERY;
                    if let Some(liveness) = self.context.liveness {
                        self.look_after_peers(&mut liveness_check, liveness);
                    }
                }
            }
            self.listen()?;
            let now = Instant::now();
            if look_behind_at <= now {
                self.look_behind_messages()?;
                look_behind_at = now + LOOK_BEHIND_EVERY;
            }
            looks = 0;
        }
    }

    /// Tells all ranks that share memory on which processor this one waits, and leaves it if a lower rank waits on the same.
    /// Returns true if another rank of this processor can continue only when this one yields.
    fn shares_processor(&mut self) -> bool {
        let own = rustix::thread::sched_getcpu();
        let (mut taken, mut below, mut above) = (Vec::new(), false, false);
        // Every peer is told, also after one that shares the processor.
        for peer in self.links.ids() {
            let Some(theirs) = self.links[peer].exchange_processors(own as u32) else { continue };
            taken.push(theirs as usize);
            let is_lower = self.links.rank(peer) < self.context.rank;
            below |= theirs as usize == own && is_lower;
            above |= theirs as usize == own && !is_lower;
        }
        if below && !self.context.spin.yields {
            return !leave_processor(own, &taken);
        }
        below || above
    }

    /// Waits as [`wait`](Self::wait) does, in several parts, between which another thread can end the call.
    fn sleep(&mut self, until: Instant) -> Result<bool> {
        let Some(interrupt) = self.context.interrupt else { return self.wait(until) };
        loop {
            interrupt.check()?;
            let piece = Instant::now() + Interrupt::LOOK_EVERY;
            if piece >= until {
                return self.wait(until);
            }
            if self.wait(piece)? && Instant::now() < piece {
                return Ok(true);
            }
        }
    }

    /// Counts a long silence as waiting: a peer that was already in the call would have sent sooner.
    #[cold]
    fn note_silence(&mut self, since: Instant) {
        let silence = since.elapsed();
        if silence > ABSENT_AFTER {
            self.progress.waited += silence;
        }
    }

    /// Moves the bytes that can move at once. Returns `true` if any did.
    fn step(&mut self) -> Result<bool> {
        let mut moved = self.give()?;
        for peer in self.links.ids() {
            moved |= self.pull(peer)?;
        }
        Ok(moved)
    }

    /// Copies and sends the bytes that can be copied and sent at once.
    fn give(&mut self) -> Result<bool> {
        let mut moved = self.copy();
        for peer in self.links.ids() {
            moved |= self.push(peer)?;
        }
        Ok(moved)
    }

    fn size(&self) -> usize {
        self.fingerprint.dtype.size()
    }

    /// Returns the length of a node in bytes.
    fn length(&self, node: usize) -> usize {
        self.compiled.lengths[node] * self.size()
    }

    /// Returns how many bytes of a node the hazards allow.
    fn allowed(&self, node: usize) -> usize {
        let size = self.size();
        let limits = self.compiled.hazards[node].iter().map(|h| h.limit(self.progress.done[h.on] / size));
        limits.fold(self.compiled.lengths[node], usize::min) * size
    }

    fn finish(&mut self) {
        self.progress.left -= 1;
    }

    fn copy(&mut self) -> bool {
        let mut moved = false;
        while let Some(&Copy { node, from, into }) = self.compiled.copies.get(self.progress.copied) {
            let (done, allowed) = (self.progress.done[node], self.allowed(node));
            let size = self.size();
            let Spaces { input, output, scratch } = &mut self.spaces;
            let read = from.start * size + done..from.start * size + allowed;
            let write = into.start * size + done..into.start * size + allowed;
            match (from.space, into.space, *input) {
                (Space::Input, Space::Output, Some(input)) => output[write].copy_from_slice(&input[read]),
                (Space::Output, Space::Scratch, _) => scratch[write].copy_from_slice(&output[read]),
                (Space::Input | Space::Output, Space::Output, _) => output.copy_within(read, write.start),
                (from, into, _) => unreachable!("no schedule copies from {from:?} to {into:?}"),
            }
            self.progress.done[node] = allowed;
            moved |= allowed > done;
            if allowed < self.length(node) {
                break;
            }
            self.progress.copied += 1;
            self.finish();
            moved = true;
        }
        moved
    }

    fn push(&mut self, peer: Peer) -> Result<bool> {
        let compiled = self.compiled;
        let mut moved = false;
        self.links[peer].flush();
        while let Some(&Send { node, region }) = compiled.sends[peer].get(self.progress.peers[peer].sent) {
            let length = self.length(node);
            let (done, allowed) = (self.progress.done[node], self.allowed(node));
            let left = length - done;
            // Sends whole segments, not small pieces; but bytes that fit together with the header are sent with it.
            if allowed - done < left.min(SEGMENT) {
                break;
            }
            let payload = self.spaces.read(region, self.fingerprint.dtype.size(), done, allowed);
            let header = self.header(length);
            let sent = self.links[peer].send_message(&header, payload, left);
            let progress = &mut self.progress.peers[peer];
            match sent {
                Sent::Complete => {
                    progress.sent += 1;
                    self.progress.done[node] = length;
                    self.finish();
                }
                Sent::Part(bytes) => self.progress.done[node] = done + bytes,
                Sent::Full(bytes) => {
                    progress.full = true;
                    self.progress.done[node] = done + bytes;
                    return Ok(moved || bytes > 0);
                }
                Sent::Closed => {
                    // The reason may still be unread in the other direction.
                    self.read_abort_reason(peer)?;
                    return Err(self.lost(peer));
                }
            }
            moved = true;
        }
        Ok(moved)
    }

    fn header(&self, length: usize) -> Header {
        Header {
            kind: Kind::Data,
            fingerprint: self.fingerprint,
            algorithm: self.compiled.spec.algorithm,
            sequence: self.sequence,
            length,
            rank: self.context.global_rank,
        }
    }
}
