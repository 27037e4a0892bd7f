//! Runs one rank's program over its links: moves whatever can move, and waits when nothing can.

mod control;
mod failure;
mod fold;
mod mismatch;
mod receive;
mod reference;
mod wait;

pub(super) use mismatch::History;

use std::time::Instant;

use super::compiled::Compiled;
use super::link::{Link, Moved, Patience};
use crate::error::Result;
use crate::operation::{Operation, Signature};
use crate::rank::Rank;
use crate::schedule::program::{Node, Region, Source, Space};
use crate::wire::frame::{HEADER, Header, Kind};

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
}
