//! Runs one rank's program over its links: moves whatever can move, and waits when nothing can.

mod control;
mod failure;
mod mismatch;
mod reference;

pub(super) use mismatch::History;

use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::compiled::{Compiled, peer};
use super::link::{Link, Moved, Patience};
use crate::call::{Operation, ReduceOp, Signature};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::reduce::{self, Source as Operand};
use crate::schedule::program::{Node, Region, Source, Space};
use crate::wire::frame::{HEADER, Header, Kind};

/// Below this, a payload goes through the read-ahead buffer, which saves a system call for its header.
const DIRECT_READ: usize = 16 << 10;

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

/// What is the same for every call of a group.
pub(super) struct Context<'a> {
    pub(super) group: &'a str,
    /// Position in the group.
    pub(super) rank: Rank,
    /// Global rank, for errors.
    pub(super) name: Rank,
    pub(super) segment: usize,
    pub(super) patience: Patience,
    /// This call and those before it.
    pub(super) history: &'a History,
}

/// Progress of a call. Kept between calls to save its allocations.
#[derive(Default, Debug)]
pub(super) struct Progress {
    /// By node: bytes done.
    done: Vec<usize>,
    /// By peer: sends finished.
    sent: Vec<usize>,
    /// By peer: messages finished.
    received: Vec<usize>,
    /// By peer: the header of its current message has been read.
    open: Vec<bool>,
    /// By peer: sends that the peer has taken out of this rank's memory.
    taken: Vec<usize>,
    /// By peer: where its current message lies in its memory.
    remote: Vec<u64>,
    /// By peer: the socket takes no more just now.
    full: Vec<bool>,
    copied: usize,
    /// Nodes not finished.
    left: usize,
}

pub(super) struct Run<'a> {
    pub(super) context: Context<'a>,
    pub(super) links: &'a mut [Option<Link>],
    pub(super) compiled: &'a Compiled,
    /// Payloads stay where they are until their receivers fetch them, instead of going through the links.
    pub(super) by_reference: bool,
    pub(super) signature: Signature,
    pub(super) sequence: u64,
    pub(super) deadline: Instant,
    pub(super) spaces: Spaces<'a>,
    pub(super) progress: &'a mut Progress,
}

impl Progress {
    fn reset(&mut self, nodes: usize, peers: usize) {
        self.done.clear();
        self.done.resize(nodes, 0);
        self.sent.clear();
        self.sent.resize(peers, 0);
        self.received.clear();
        self.received.resize(peers, 0);
        self.open.clear();
        self.open.resize(peers, false);
        self.taken.clear();
        self.taken.resize(peers, 0);
        self.remote.clear();
        self.remote.resize(peers, 0);
        self.full.clear();
        self.full.resize(peers, false);
        self.copied = 0;
        self.left = nodes;
    }
}

impl Run<'_> {
    /// Does the whole program.
    pub(super) fn run(mut self) -> Result<()> {
        let started = Instant::now();
        self.progress.reset(self.compiled.nodes.len(), self.links.len());
        let mut idle_since = started;
        let mut looks = 0u32;
        let may_ask = !self.signature.operation.is_point_to_point();
        let mut ask_at = may_ask.then(|| started + mismatch::ASK_AFTER);
        loop {
            let moved = self.step()?;
            if self.progress.left == 0 && !self.has_more_to_say() {
                // All have come, and all that they sent before is there: also what no later call may look at for long.
                return if self.signature.operation == Operation::Barrier { self.listen() } else { Ok(()) };
            }
            if moved {
                looks = 0;
                continue;
            }
            // The clock is read once news have failed to come, not before every look at a socket.
            if looks == 0 {
                idle_since = Instant::now();
            }
            looks += 1;
            let until = ask_at.unwrap_or(self.deadline).min(self.deadline);
            if self.context.patience.look_again(idle_since, until) {
                // A peer that we expect nothing from may have something to say.
                if looks.is_multiple_of(64) {
                    self.listen()?;
                }
                continue;
            }
            if !self.wait(until)? {
                if ask_at.take().is_none_or(|at| at >= self.deadline) {
                    return Err(self.give_up(started));
                }
                self.ask();
            }
            self.listen()?;
            looks = 0;
        }
    }

    /// Moves what can be moved at once. `true` if anything has.
    fn step(&mut self) -> Result<bool> {
        let mut moved = self.copy();
        for peer in 0..self.links.len() {
            if self.links[peer].is_some() {
                moved |= if self.by_reference { self.offer(peer)? } else { self.push(peer)? };
            }
        }
        for peer in 0..self.links.len() {
            if self.links[peer].is_some() {
                moved |= self.pull(peer)?;
            }
        }
        Ok(moved)
    }

    fn size(&self) -> usize {
        self.signature.dtype.size()
    }

    /// Length of a node in bytes.
    fn length(&self, node: usize) -> usize {
        self.compiled.nodes[node].region().len() * self.size()
    }

    /// How far hazards let a node go, in bytes.
    fn allowed(&self, node: usize) -> usize {
        let size = self.size();
        let elements = self.compiled.nodes[node].region().len();
        let limits = self.compiled.hazards[node].iter().map(|h| h.limit(self.progress.done[h.on] / size));
        limits.fold(elements, usize::min) * size
    }

    fn finish(&mut self) {
        self.progress.left -= 1;
    }

    // ---- copies ----------------------------------------------------------------------------------------------

    fn copy(&mut self) -> bool {
        let mut moved = false;
        while let Some(&node) = self.compiled.copies.get(self.progress.copied) {
            let (done, allowed) = (self.progress.done[node], self.allowed(node));
            let Node::Fold { into, sources, .. } = &self.compiled.nodes[node] else { unreachable!() };
            let [Source::Own(from)] = sources[..] else { unreachable!("a copy has one source") };
            let size = self.size();
            let Spaces { input, output, scratch } = &mut self.spaces;
            let read = from.start * size + done..from.start * size + allowed;
            let write = into.start * size + done..into.start * size + allowed;
            match (from.space, into.space, *input) {
                (Space::Input, Space::Output, Some(input)) => output[write].copy_from_slice(&input[read]),
                (Space::Output, Space::Scratch, _) => scratch[write].copy_from_slice(&output[read]),
                (_, Space::Output, _) => output.copy_within(read, write.start),
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

    // ---- sending ---------------------------------------------------------------------------------------------

    fn push(&mut self, peer: usize) -> Result<bool> {
        let mut moved = false;
        while let Some(&node) = self.compiled.sends[peer].get(self.progress.sent[peer]) {
            let length = self.length(node);
            let (done, allowed) = (self.progress.done[node], self.allowed(node));
            // Whole segments, not dribbles; but what can go together with the header goes.
            if length > 0 && allowed - done < self.context.segment.min(length - done) {
                break;
            }
            let Node::Send { region, .. } = self.compiled.nodes[node] else { unreachable!() };
            let header = self.header(length).encode();
            let size = self.signature.dtype.size();
            let payload = self.spaces.read(region, size, done, allowed);
            let link = self.links[peer].as_mut().expect("only links are pushed");
            if !link.mid_frame && !link.flush_control() {
                self.progress.full[peer] = true;
                break;
            }
            let begun = link.header_sent;
            let bytes = match link.send(&header[begun..], payload) {
                Moved::Bytes(bytes) => bytes,
                Moved::WouldBlock => {
                    self.progress.full[peer] = true;
                    break;
                }
                Moved::Closed => {
                    // The reason may still wait in the other direction.
                    self.drain_last_words(peer)?;
                    return Err(self.lost(peer));
                }
            };
            moved = true;
            let of_header = bytes.min(HEADER - begun);
            link.header_sent += of_header;
            self.progress.done[node] = done + bytes - of_header;
            link.mid_frame = link.header_sent < HEADER || self.progress.done[node] < length;
            if !link.mid_frame {
                link.header_sent = 0;
                self.progress.sent[peer] += 1;
                self.finish();
            } else if bytes < HEADER - begun + allowed - done {
                self.progress.full[peer] = true;
                break;
            }
        }
        Ok(moved)
    }

    fn header(&self, length: usize) -> Header {
        Header {
            kind: Kind::Data,
            signature: self.signature,
            algorithm: self.compiled.shape.algorithm,
            sequence: self.sequence,
            length,
            address: 0,
            rank: self.context.name,
        }
    }

    // ---- receiving -------------------------------------------------------------------------------------------

    fn pull(&mut self, peer: usize) -> Result<bool> {
        let mut moved = false;
        while let Some(&node) = self.compiled.receives[peer].get(self.progress.received[peer]) {
            if !self.progress.open[peer] {
                if self.take_letter(peer, node)? {
                    moved = true;
                    continue;
                }
                if !self.open(peer, node)? {
                    // While a header was looked for, the rest of a message that came early may have been read.
                    if self.take_letter(peer, node)? {
                        moved = true;
                        continue;
                    }
                    break;
                }
                moved = true;
            }
            let more = match (&self.compiled.nodes[node], self.by_reference) {
                (Node::Receive { region, .. }, false) => self.receive(peer, node, *region)?,
                (Node::Receive { region, .. }, true) => self.fetch(peer, node, *region)?,
                (_, false) => self.fold(peer, node)?,
                (_, true) => self.fold_fetched(node)?,
            };
            moved |= more;
            if !more {
                break;
            }
        }
        Ok(moved)
    }

    /// Gets the header of the next expected message, and checks that it is the one expected.
    fn open(&mut self, peer: usize, node: usize) -> Result<bool> {
        let Some(header) = self.next_header(peer)? else { return Ok(false) };
        let length = self.length(node);
        let link = self.links[peer].as_mut().expect("only links are pulled");
        if self.signature.operation.is_point_to_point() && !link.inbox.is_empty() {
            return Ok(false);
        }
        let from_peer = matches!(header.signature.operation, Operation::Send { .. });
        if from_peer && !self.signature.operation.is_point_to_point() {
            // A message that will be asked for later stands before the one we need.
            link.header = None;
            if !link.begin_letter(header) {
                link.header = Some(header);
                return Ok(false);
            }
            link.continue_letter();
            return Ok(false);
        }
        let is_ahead = !self.signature.operation.is_point_to_point() && header.sequence > self.sequence;
        if is_ahead {
            return Err(self.overtaken(peer, &header));
        }
        self.check(peer, &header)?;
        if header.length != length {
            return Err(
                self.corrupt(peer, &format!("a payload of {} bytes instead of {length}", header.length))
            );
        }
        let link = self.links[peer].as_mut().expect("only links are pulled");
        if self.by_reference {
            link.offers.pop_front();
            self.progress.remote[peer] = header.address;
        } else {
            link.header = None;
        }
        self.progress.open[peer] = true;
        Ok(true)
    }

    /// A message that came early satisfies a receive at once.
    fn take_letter(&mut self, peer: usize, node: usize) -> Result<bool> {
        let is_message = self.signature.operation.is_point_to_point();
        let link = self.links[peer].as_mut().expect("only links are pulled");
        if !is_message || link.partial.is_some() && !link.continue_letter() {
            return Ok(false);
        }
        let Some(letter) = link.inbox.pop_front() else { return Ok(false) };
        self.check(peer, &letter.header)?;
        let size = self.size();
        let region = self.compiled.nodes[node].region();
        self.spaces.write(region, size, 0, letter.bytes.len()).copy_from_slice(&letter.bytes);
        self.progress.done[node] = letter.bytes.len();
        self.progress.received[peer] += 1;
        self.finish();
        Ok(true)
    }

    fn receive(&mut self, peer: usize, node: usize, region: Region) -> Result<bool> {
        let (length, allowed) = (self.length(node), self.allowed(node));
        let done = self.progress.done[node];
        let size = self.size();
        let link = self.links[peer].as_mut().expect("only links are pulled");
        let room = allowed - done;
        let mut taken = room.min(link.buffered().len());
        if taken > 0 {
            let target = self.spaces.write(region, size, done, done + taken);
            target.copy_from_slice(&link.buffered()[..taken]);
            link.consume(taken);
        } else if room > 0 {
            let target = self.spaces.write(region, size, done, allowed);
            let moved = if target.len() >= DIRECT_READ { link.read_into(target) } else { link.fill() };
            match moved {
                Moved::Bytes(bytes) if room >= DIRECT_READ => taken = bytes,
                Moved::Bytes(_) => return Ok(true),
                Moved::WouldBlock => return Ok(false),
                Moved::Closed => return Err(self.lost(peer)),
            }
        }
        self.progress.done[node] = done + taken;
        if self.progress.done[node] == length {
            self.close_message(peer);
            self.finish();
            return Ok(true);
        }
        Ok(taken > 0)
    }

    fn close_message(&mut self, peer: usize) {
        self.progress.open[peer] = false;
        self.progress.received[peer] += 1;
    }

    /// Folds as many elements as every operand has and hazards allow; reads more from `peer` first if it lacks.
    fn fold(&mut self, from: usize, node: usize) -> Result<bool> {
        let length = self.length(node);
        let done = self.progress.done[node];
        let mut read = false;
        let link = self.links[from].as_mut().expect("only links are pulled");
        if link.buffered().len() < (length - done).min(self.context.segment) {
            match link.fill() {
                Moved::Bytes(bytes) => read = bytes > 0,
                Moved::Closed if link.buffered().len() < length - done => return Err(self.lost(from)),
                Moved::WouldBlock | Moved::Closed => {}
            }
        }
        let size = self.size();
        let (compiled, allowed) = (self.compiled, self.allowed(node));
        let Node::Fold { into, sources, last } = &compiled.nodes[node] else { unreachable!() };
        let mut ready = allowed - done;
        for other in sources.iter().filter_map(peer) {
            let at_node = compiled.receives[other].get(self.progress.received[other]) == Some(&node);
            if !at_node || !self.progress.open[other] {
                return Ok(read);
            }
            ready = ready.min(self.links[other].as_ref().expect("sources are links").buffered().len());
        }
        ready -= ready % size;
        if ready > 0 {
            self.fold_ready(*into, sources, *last, done, ready);
            self.progress.done[node] += ready;
            for other in sources.iter().filter_map(peer) {
                self.links[other].as_mut().expect("sources are links").consume(ready);
            }
        }
        if self.progress.done[node] == length {
            for other in sources.iter().filter_map(peer) {
                self.close_message(other);
            }
            self.finish();
            return Ok(true);
        }
        Ok(read || ready > 0)
    }

    fn fold_ready(&mut self, into: Region, sources: &[Source], last: bool, done: usize, ready: usize) {
        let size = self.size();
        let op = self.signature.operation.reduce_op().unwrap_or(ReduceOp::Max);
        let divisor = (last && op == ReduceOp::Avg).then_some(self.links.len());
        let by_reference = self.by_reference;
        let Spaces { input, output, scratch } = &mut self.spaces;
        let own_space = sources.iter().find_map(|s| match s {
            Source::Own(region) => Some(*region),
            Source::Peer(_) => None,
        });
        let (target, own): (&mut [u8], Option<&[u8]>) = match (into.space, own_space.map(|r| r.space)) {
            (Space::Scratch, Some(Space::Output)) => (scratch, Some(&**output)),
            (Space::Scratch, Some(Space::Input)) => (scratch, *input),
            (_, Some(Space::Input)) => (output, *input),
            (Space::Scratch, _) => (scratch, None),
            _ => (output, None),
        };
        let operands: Vec<Operand<'_>> = sources
            .iter()
            .map(|source| match (source, own) {
                (Source::Peer(rank), _) => {
                    let link = self.links[*rank].as_ref().expect("sources are links");
                    let bytes = if by_reference { link.staged() } else { link.buffered() };
                    Operand::Bytes(&bytes[..ready])
                }
                (Source::Own(region), Some(own)) => {
                    Operand::Bytes(&own[region.start * size + done..region.start * size + done + ready])
                }
                (Source::Own(_), None) => Operand::Destination,
            })
            .collect();
        let at = into.start * size + done;
        reduce::fold(self.signature.dtype, op, &mut target[at..at + ready], &operands, divisor);
    }

    // ---- waiting ---------------------------------------------------------------------------------------------

    /// Sleeps until a link has news. `false` once `until` has passed.
    fn wait(&mut self, until: Instant) -> Result<bool> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let mut fds = Vec::with_capacity(self.links.len());
        for (peer, link) in self.links.iter().enumerate() {
            let Some(link) = link else { continue };
            let mut flags = PollFlags::empty();
            // A message that waits for its turn keeps what is behind it in the socket; of any other frame the rest is wanted.
            let is_held = link.header.is_some_and(|header| header.kind == Kind::Data);
            if link.closed.is_none() && (self.in_payload(peer) || !is_held) && self.can_take(peer) {
                flags |= PollFlags::IN;
            }
            if self.progress.full[peer] || link.has_control() && !link.mid_frame {
                flags |= PollFlags::OUT;
            }
            // Without flags, poll would still report a peer that has gone, again and again.
            if !flags.is_empty() {
                fds.push(PollFd::new(link.stream(), flags));
            }
        }
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::Transport(format!("waiting for links: {e}"))),
        }
        self.progress.full.fill(false);
        Ok(true)
    }

    /// Whether bytes of this peer could be taken now: not while a hazard or another operand holds its message up.
    fn can_take(&self, peer: usize) -> bool {
        if !self.in_payload(peer) {
            return true;
        }
        let Some(&node) = self.compiled.receives[peer].get(self.progress.received[peer]) else { return true };
        let done = self.progress.done[node];
        match &self.compiled.nodes[node] {
            Node::Fold { .. } => {
                let link = self.links[peer].as_ref().expect("only links are asked");
                link.buffered().len() < (self.length(node) - done).min(self.context.segment)
            }
            _ => self.allowed(node) > done,
        }
    }
}
