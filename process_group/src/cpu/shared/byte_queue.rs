//! Moves bytes from one rank to another through a segment, in order.
//!
//! Each rank has a segment of its own: a [doorbell](super::doorbell), and a ring for each rank of its host that writes to it.
//! Positions only grow. Each end keeps its own position in private memory and publishes it; it accepts only valid positions from
//! the other end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, fence};

use super::doorbell::Waker;
use super::segment::Segment;

/// Offset of the control blocks of the rings.
const CONTROLS: usize = 4096;
/// Bytes of a control block: those that the writer writes, those that the reader writes, and those that both write.
const CONTROL: usize = 192;
pub(super) const HEAD: usize = 0;
/// The writer's last announcement that it waits: its number in the upper half, and the writer's processor in the lower.
const WAITS: usize = 8;
pub(super) const TAIL: usize = 64;
const STARVED: usize = 128;
/// Number of bytes that one end copies before it tells the other, which can continue in the meantime.
const PUBLISHED: usize = 32 << 10;

/// Bytes of a ring, with few ranks.
pub(super) const RING: usize = 256 << 10;

/// The layout of a group's segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    /// Number of ranks on the host.
    ranks: usize,
    /// Bytes of each ring.
    capacity: usize,
}

impl Layout {
    /// Returns the layout for a host with this number of ranks.
    pub(super) fn of(ranks: usize) -> Self {
        // Written bytes stay in the cache of a core until they are read, also if both ranks run on hyperthreads of that core and the
        // vectors pass through it too. And many ranks do not need much memory. A message that does not fit waits for its reader.
        let share = (2 << 20) / ranks.next_power_of_two();
        Self { ranks, capacity: share.clamp(16 << 10, RING) }
    }

    /// Returns the length of the segment in bytes.
    pub(super) fn len(self) -> usize {
        self.data(self.ranks)
    }

    const fn control(writer: usize) -> usize {
        CONTROLS + writer * CONTROL
    }

    fn data(self, writer: usize) -> usize {
        Self::control(self.ranks).next_multiple_of(4096) + writer * self.capacity
    }
}

/// The ring from one rank to another, seen from either end.
#[derive(Debug)]
pub(super) struct ByteQueue {
    pub(super) segment: Arc<Segment>,
    pub(super) control: usize,
    data: usize,
    capacity: usize,
    /// Number of bytes that this end has written or read.
    position: u64,
    /// For the writer: the reader's position at the last look. A look takes the word out of the reader's cache.
    seen_read: u64,
    /// The number of the last announcement that this end has made or taken.
    announcement: u32,
}

impl ByteQueue {
    fn new(segment: &Arc<Segment>, layout: Layout, writer: usize) -> Self {
        let (control, data) = (Layout::control(writer), layout.data(writer));
        Self {
            segment: Arc::clone(segment),
            control,
            data,
            capacity: layout.capacity,
            position: 0,
            seen_read: 0,
            announcement: 0,
        }
    }

    /// Returns the number of bytes from the reader's position to the writer's, if that is valid.
    fn checked(&self, bytes: u64) -> io::Result<usize> {
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= self.capacity => Ok(bytes),
            _ => {
                Err(io::Error::other("the shared memory of this link is corrupt: a position is out of range"))
            }
        }
    }

    /// For the writer: returns a number of bytes that surely fit. Looks at the reader's position only if fewer than `wanted` do.
    fn space(&mut self, wanted: usize) -> io::Result<usize> {
        let space = self.capacity - self.checked(self.position.wrapping_sub(self.seen_read))?;
        if space >= wanted {
            return Ok(space);
        }
        self.seen_read = self.segment.double_word(self.control + TAIL).load(Acquire);
        Ok(self.capacity - self.checked(self.position.wrapping_sub(self.seen_read))?)
    }

    /// For the writer: returns true if there is no room. An invalid position does not count as full: the next write reports it.
    fn is_full(&self) -> bool {
        let read = self.segment.double_word(self.control + TAIL).load(Acquire);
        self.position.wrapping_sub(read) == self.capacity as u64
    }

    /// For the reader: returns the number of available bytes.
    fn there(&self) -> io::Result<usize> {
        let written = self.segment.double_word(self.control + HEAD).load(Acquire);
        self.checked(written.wrapping_sub(self.position))
    }

    /// Returns the position and the length of the next bytes: up to `len`, and no further than the end of the ring.
    fn next(&self, len: usize) -> (usize, usize) {
        let at = (self.position % self.capacity as u64) as usize;
        (self.data + at, len.min(self.capacity - at))
    }

    /// For the writer: copies bytes into the ring, which must have room for them.
    fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (at, len) = self.next(bytes.len());
            self.segment.write(at, &bytes[..len]);
            self.position = self.position.wrapping_add(len as u64);
            bytes = &bytes[len..];
        }
    }

    /// For the reader: copies available bytes out of the ring.
    fn read(&mut self, mut into: &mut [u8]) {
        while !into.is_empty() {
            let (at, len) = self.next(into.len());
            let (piece, rest) = into.split_at_mut(len);
            self.segment.read(at, piece);
            self.position = self.position.wrapping_add(len as u64);
            into = rest;
        }
    }

    /// Publishes the position of this end to the other.
    fn publish(&self, word: usize) {
        self.segment.double_word(self.control + word).store(self.position, Release);
    }

    /// For the writer: announces that it waits on this processor.
    fn announce(&mut self, processor: u32) {
        self.announcement = self.announcement.wrapping_add(1);
        let word = u64::from(self.announcement) << 32 | u64::from(processor);
        self.segment.double_word(self.control + WAITS).store(word, Relaxed);
    }

    /// For the reader: returns the processor of an announcement that it has not taken yet.
    fn take_announcement(&mut self) -> Option<u32> {
        let word = self.segment.double_word(self.control + WAITS).load(Relaxed);
        let number = (word >> 32) as u32;
        (std::mem::replace(&mut self.announcement, number) != number).then_some(word as u32)
    }

    /// Returns the flag with which the writer shows that it waits for room.
    fn starved(&self) -> &AtomicU32 {
        self.segment.word(self.control + STARVED)
    }
}

/// Both directions between this rank and another.
#[derive(Debug)]
pub(in crate::cpu) struct ByteQueues {
    pub(super) out: ByteQueue,
    pub(super) into: ByteQueue,
    waker: Waker,
}

impl ByteQueues {
    /// Creates the rings between `me`, the owner of `mine`, and `peer`, which `waker` wakes. Both are places on the host.
    pub(super) fn new(
        layout: Layout,
        (me, mine): (usize, &Arc<Segment>),
        (peer, waker): (usize, Waker),
    ) -> Self {
        Self {
            out: ByteQueue::new(waker.segment(), layout, me),
            into: ByteQueue::new(mine, layout, peer),
            waker,
        }
    }

    /// Writes two pieces, in order, as far as there is room.
    ///
    /// # Errors
    /// `WouldBlock` when there is none.
    pub(in crate::cpu) fn send(&mut self, first: &[u8], second: &[u8]) -> io::Result<usize> {
        let space = self.out.space(first.len() + second.len())?;
        if space == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let first = &first[..first.len().min(space)];
        let second = &second[..second.len().min(space - first.len())];
        let (with_first, rest) = second.split_at(second.len().min(PUBLISHED));
        self.out.write(first);
        self.put(with_first);
        rest.chunks(PUBLISHED).for_each(|piece| self.put(piece));
        Ok(first.len() + second.len())
    }

    /// Copies a piece into the ring, publishes all bytes copied so far, and wakes the reader.
    fn put(&mut self, piece: &[u8]) {
        self.out.write(piece);
        self.out.publish(HEAD);
        self.waker.wake();
    }

    /// Reads the available bytes, the first piece first.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is.
    pub(in crate::cpu) fn read_pair(&mut self, first: &mut [u8], second: &mut [u8]) -> io::Result<usize> {
        let there = self.into.there()?;
        if there == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let first_len = first.len().min(there);
        let second_len = second.len().min(there - first_len);
        for piece in first[..first_len].chunks_mut(PUBLISHED) {
            self.into.read(piece);
            self.into.publish(TAIL);
        }
        if second_len > 0 {
            self.into.read(&mut second[..second_len]);
            self.into.publish(TAIL);
        }
        // A writer waits only while the ring is full. The fence, which orders the position before the look, takes as long as a
        // short read, so it is left out where a full ring is unlikely. The next read notices a writer that has just filled this
        // ring, and that writer looks again after `Doorbell::NAP`.
        if there >= self.into.capacity / 2 {
            fence(SeqCst);
            if self.into.starved().load(Relaxed) != 0 {
                self.into.starved().store(0, Relaxed);
                self.waker.wake();
            }
        }
        Ok(first_len + second_len)
    }

    /// Returns true if there is something to read. That includes an invalid position, which the next read reports.
    pub(in crate::cpu) fn has_unread(&self) -> bool {
        !matches!(self.into.there(), Ok(0))
    }

    /// Returns true if there is room to write. If not, the reader rings when there is.
    pub(in crate::cpu) fn has_room(&self) -> bool {
        self.out.starved().store(1, SeqCst);
        fence(SeqCst);
        !self.out.is_full()
    }

    /// Announces that this rank waits on `processor`. Returns the one on which the peer has waited since the last call; each
    /// announcement counts once, because the peer may run elsewhere by now.
    pub(in crate::cpu) fn exchange_processors(&mut self, processor: u32) -> Option<u32> {
        self.out.announce(processor);
        self.into.take_announcement()
    }
}
