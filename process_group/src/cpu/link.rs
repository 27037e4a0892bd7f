//! A connection to a peer: buffered reading, and the bytes that must not interrupt a frame in transit.

use std::collections::VecDeque;
use std::io;

use rustix::net::Shutdown;

use super::SEGMENT;
use super::shared::ByteQueues;
use super::unexpected::{LIMIT, UnexpectedMessage};
use crate::link::security::{Channel, Socket};
use crate::link::wire::frame::{HEADER, Header, Kind, MAX_REASON};
use crate::membership::roster::Member;
use crate::types::rank::Rank;

/// Bytes after the wanted ones that one system call reads. A larger part of a payload would be copied once more than necessary.
const READ_AHEAD: usize = 8 << 10;

/// Length below which the rest of a payload comes from a socket through the buffer, together with the bytes after it.
const DIRECT_READ: usize = 16 << 10;

#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: Member,
    channel: Channel,
    /// The rings that replace the channel for bytes in both directions. The channel then shows whether the peer is alive, and
    /// carries the last frames of a rank that leaves: the peer may not have switched to the rings yet.
    shared: Option<Shared>,
    rx: Vec<u8>,
    rx_start: usize,
    rx_end: usize,
    /// Header of the next frame: read, but not used yet.
    pub(super) header: Option<Header>,
    /// The reason for which the other end has closed, if it has.
    pub(super) closed: Option<String>,
    /// True if the other end has announced an orderly exit.
    pub(super) goodbye: bool,
    /// The newest collective that the peer is known to have reached. The creation of the group is number 0.
    pub(super) seen: Option<u64>,
    /// True if the peer has answered the question of this rank.
    pub(super) answered: bool,
    /// Number of bytes of the current frame's header that have been sent; the payload follows.
    pub(super) header_sent: usize,
    /// True while a frame is begun and not finished: nothing else may be sent.
    pub(super) mid_frame: bool,
    /// Control frames to send at the next frame boundary.
    control: Vec<u8>,
    /// Messages that arrived before this rank asked for them, oldest first.
    pub(super) unexpected: VecDeque<UnexpectedMessage>,
    /// A message that has not arrived completely: the next bytes on the link are the rest of it.
    pub(super) partial: Option<UnexpectedMessage>,
}

/// A link through memory.
#[derive(Debug)]
struct Shared {
    rings: ByteQueues,
    /// The header and the bytes that had arrived on the channel before.
    before: (Option<Header>, Vec<u8>),
    /// True if the peer has closed its end of the channel: the ring receives no more bytes.
    is_over: bool,
}

/// The result of an attempt to move bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moved {
    Bytes(usize),
    WouldBlock,
    Closed,
}

/// The result of an attempt to send a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sent {
    /// The whole message has been sent.
    Complete,
    /// This number of bytes of the payload has been sent, and more may follow at once.
    Part(usize),
    /// This number of bytes has been sent, and the link accepts no more at present.
    Full(usize),
    /// The link has ended.
    Closed,
}

/// The last frame of a peer that has closed its end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    Goodbye,
    Abort {
        rank: Rank,
        reason: String,
    },
    /// The peer has ended without a word.
    None,
}

impl Ending {
    /// Finds it in a frame whose header has been read, and the bytes after it.
    fn find(mut header: Option<Header>, mut bytes: &[u8]) -> Self {
        loop {
            let next = header.take().or_else(|| {
                let (head, rest) = bytes.split_first_chunk::<HEADER>()?;
                bytes = rest;
                Header::decode(head)
            });
            let Some(Header { kind, length, rank, .. }) = next else { return Self::None };
            let Some((payload, rest)) = bytes.split_at_checked(length) else { return Self::None };
            match kind {
                Kind::Goodbye => return Self::Goodbye,
                Kind::Abort => {
                    return Self::Abort { rank, reason: String::from_utf8_lossy(payload).into_owned() };
                }
                Kind::Data | Kind::Query | Kind::Answer => bytes = rest,
            }
        }
    }
}

/// Error: the bytes are not a frame header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NoHeader;

impl Link {
    pub(super) fn new(peer: Member, channel: Channel) -> Self {
        Self {
            peer,
            channel,
            shared: None,
            rx: vec![0; SEGMENT + HEADER],
            rx_start: 0,
            rx_end: 0,
            header: None,
            closed: None,
            goodbye: false,
            seen: None,
            answered: false,
            header_sent: 0,
            mid_frame: false,
            control: Vec::new(),
            unexpected: VecDeque::new(),
            partial: None,
        }
    }

    /// Switches to these rings: later bytes go through them. The peer does the same at the same point.
    pub(super) fn share(&mut self, rings: ByteQueues) {
        // These are questions, which need no answer any more, or an abort.
        let before = (self.header.take(), self.buffered().to_vec());
        (self.rx_start, self.rx_end) = (0, 0);
        // Part of it may have been sent through the channel.
        self.control.clear();
        self.shared = Some(Shared { rings, before, is_over: false });
    }

    /// Called after the peer has left and its ring is empty: returns to its frames on the channel. Returns `false` in the middle of
    /// a frame, or without rings.
    pub(super) fn return_to_channel(&mut self) -> bool {
        let is_between_frames = self.is_between_frames();
        let Some(Shared { before: (header, bytes), .. }) =
            self.shared.take_if(|shared| shared.is_over && is_between_frames)
        else {
            return false;
        };
        self.rx[..bytes.len()].copy_from_slice(&bytes);
        (self.header, self.rx_start, self.rx_end) = (header, 0, bytes.len());
        self.closed = None;
        true
    }

    /// Also sends a frame on the channel of a link with rings, as far as the channel accepts it now.
    pub(super) fn say_on_socket(&mut self, header: &Header, payload: &[u8]) {
        if self.is_shared() && self.channel.send(&header.encode(), payload).is_ok() {
            // A peer that has left needs no frame.
            let _ = self.channel.flush();
        }
    }

    /// Returns true if bytes go through memory.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Returns true if there is something to read in memory, or room to write.
    pub(super) fn has_news(&self, to_read: bool, to_write: bool) -> bool {
        let rings = self.shared.as_ref().map(|shared| &shared.rings);
        rings.is_some_and(|rings| to_read && rings.has_unread() || to_write && rings.has_room())
    }

    /// Tells the peer of a link with rings that this rank waits on `processor`. Returns the one on which the peer has lately waited.
    pub(super) fn exchange_processors(&mut self, processor: u32) -> Option<u32> {
        self.shared.as_mut()?.rings.exchange_processors(processor)
    }

    /// Notes whether the peer of a link with rings has left.
    pub(super) fn look_at_channel(&mut self) {
        if let Some(shared) = self.shared.as_mut().filter(|_| self.closed.is_none()) {
            shared.is_over |= self.channel.is_over();
        }
    }

    /// Called while the next bytes of the link, `skip` of a payload and the frames behind them, wait for other ranks: returns the last frame
    /// of a peer that has closed its end, and leaves all in place. A closed socket has no more bytes than its buffer.
    pub(super) fn ending(&mut self, skip: usize) -> Option<Ending> {
        if self.closed.is_some() || !self.channel.is_over() {
            return None;
        }
        if let Some(Shared { before: (header, bytes), .. }) = &mut self.shared {
            let mut piece = [0; HEADER + MAX_REASON];
            while bytes.len() + piece.len() <= self.rx.len() {
                match self.channel.read(&mut piece) {
                    Ok(n) if n > 0 => bytes.extend_from_slice(&piece[..n]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    _ => break,
                }
            }
            return Some(Ending::find(*header, bytes));
        }
        loop {
            if self.buffered().len() == self.rx.len() {
                self.rx.resize(2 * self.rx.len(), 0);
            }
            match self.fill(usize::MAX) {
                Moved::Bytes(_) => {}
                Moved::WouldBlock => return None,
                Moved::Closed => break,
            }
        }
        Some(Ending::find(self.header, self.buffered().get(skip..).unwrap_or_default()))
    }

    pub(super) fn socket(&self) -> &Socket {
        self.channel.socket()
    }

    /// Returns true if there are bytes to read that a poll of the stream does not show.
    pub(super) fn has_unread(&self) -> bool {
        self.channel.has_unread()
    }

    /// Returns true if the stream has not accepted all sent bytes yet.
    pub(super) fn has_unsent(&self) -> bool {
        // A closed stream accepts no more bytes, and a poll of it always reports news.
        self.closed.is_none() && !self.is_shared() && self.channel.has_unsent()
    }

    /// Passes on sent bytes that the stream has not accepted yet. Returns `false` while some are left.
    #[inline]
    pub(super) fn flush(&mut self) -> bool {
        if !self.channel.has_unsent() {
            return true;
        }
        match self.channel.flush() {
            Ok(all) => all,
            // No peer is left to read them.
            Err(error) => {
                self.closed.get_or_insert_with(|| error.to_string());
                true
            }
        }
    }

    /// Returns the bytes that were read ahead.
    pub(super) fn buffered(&self) -> &[u8] {
        &self.rx[self.rx_start..self.rx_end]
    }

    pub(super) fn consume(&mut self, bytes: usize) {
        self.rx_start += bytes;
        debug_assert!(self.rx_start <= self.rx_end);
        if self.rx_start == self.rx_end {
            (self.rx_start, self.rx_end) = (0, 0);
        }
    }

    /// Reads available bytes into the buffer until it contains `wanted` bytes; from a socket, up to [`READ_AHEAD`] more.
    pub(super) fn fill(&mut self, wanted: usize) -> Moved {
        if self.rx_end == self.rx.len() {
            if self.rx_start == 0 {
                return Moved::Bytes(0);
            }
            self.rx.copy_within(self.rx_start..self.rx_end, 0);
            (self.rx_start, self.rx_end) = (0, self.rx_end - self.rx_start);
        }
        let ahead = if self.is_shared() { 0 } else { READ_AHEAD };
        let end = self.rx_start.saturating_add(wanted).saturating_add(ahead).min(self.rx.len());
        if end <= self.rx_end {
            return Moved::Bytes(0);
        }
        let into = &mut self.rx[self.rx_end..end];
        let read = match &mut self.shared {
            None => self.channel.read(into),
            Some(Shared { rings, .. }) => rings.read_pair(into, &mut []),
        };
        let moved = self.outcome(read);
        if let Moved::Bytes(n) = moved {
            self.rx_end += n;
        }
        moved
    }

    /// Reads past the (empty) buffer into `target`, and the bytes after that into the buffer.
    pub(super) fn read_into(&mut self, target: &mut [u8]) -> Moved {
        debug_assert!(self.rx_start == self.rx_end);
        (self.rx_start, self.rx_end) = (0, 0);
        let wanted = target.len();
        // Just enough for the next header, so that payloads still go directly to their destination.
        let next = &mut self.rx[..HEADER];
        let read = match &mut self.shared {
            None => self.channel.read_pair(target, next),
            Some(Shared { rings, .. }) => rings.read_pair(target, next),
        };
        match self.outcome(read) {
            Moved::Bytes(n) if n > wanted => {
                self.rx_end = n - wanted;
                Moved::Bytes(wanted)
            }
            other => other,
        }
    }

    /// Reads the header of the expected message from the socket, and the available part of its payload into `target`.
    ///
    /// Returns the number of bytes of that part, or [`Moved::WouldBlock`] if nothing has arrived. Returns `None` if another message
    /// comes first: the buffer then contains it.
    pub(super) fn read_message(&mut self, expected: &[u8; HEADER], target: &mut [u8]) -> Option<Moved> {
        debug_assert!(!self.is_shared());
        if !self.is_between_frames() {
            return None;
        }
        // If it is another message, the buffer has to contain it.
        let most = target.len().min(self.rx.len() - HEADER);
        let target = &mut target[..most];
        let read = self.channel.read_pair(&mut self.rx[..HEADER], target);
        let bytes = match self.outcome(read) {
            Moved::Bytes(bytes) => bytes,
            Moved::WouldBlock => return Some(Moved::WouldBlock),
            Moved::Closed => return None,
        };
        let of_payload = bytes.saturating_sub(HEADER);
        if bytes >= HEADER && self.rx[..HEADER] == *expected {
            return Some(Moved::Bytes(of_payload));
        }
        (self.rx_start, self.rx_end) = (0, bytes);
        self.rx[bytes - of_payload..bytes].copy_from_slice(&target[..of_payload]);
        None
    }

    /// Returns true if the next byte of the link begins a frame.
    fn is_between_frames(&self) -> bool {
        self.rx_start == self.rx_end && self.header.is_none() && self.partial.is_none()
    }

    /// Takes a header from the buffer, if it contains a whole one.
    ///
    /// # Errors
    /// [`NoHeader`] for bytes that no rank of this version sends.
    pub(super) fn parse_header(&mut self) -> Result<Option<Header>, NoHeader> {
        let Some(bytes) = self.buffered().first_chunk::<HEADER>() else { return Ok(None) };
        let header = Header::decode(bytes).ok_or(NoHeader)?;
        self.consume(HEADER);
        Ok(Some(header))
    }

    /// Sends more of a message: `payload` is the part that may be sent now, from the end of the previous part, and `left` counts
    /// the bytes from there on, including those that may not be sent yet.
    pub(super) fn send_message(&mut self, header: &Header, payload: &[u8], left: usize) -> Sent {
        if !self.mid_frame && !self.flush_control() {
            return Sent::Full(0);
        }
        let (header, begun) = (header.encode(), self.header_sent);
        let bytes = match self.send(&header[begun..], payload) {
            Moved::Bytes(bytes) => bytes,
            Moved::WouldBlock => return Sent::Full(0),
            Moved::Closed => return Sent::Closed,
        };
        let of_header = bytes.min(HEADER - begun);
        let of_payload = bytes - of_header;
        self.header_sent += of_header;
        self.mid_frame = self.header_sent < HEADER || of_payload < left;
        if !self.mid_frame {
            self.header_sent = 0;
            return Sent::Complete;
        }
        let all = bytes == HEADER - begun + payload.len();
        if all { Sent::Part(of_payload) } else { Sent::Full(of_payload) }
    }

    /// Receives more of the open message's payload, into its destination.
    pub(super) fn receive(&mut self, into: &mut [u8]) -> Moved {
        if self.buffered().is_empty() && !into.is_empty() {
            if into.len() >= DIRECT_READ || self.is_shared() {
                return self.read_into(into);
            }
            match self.fill(into.len()) {
                Moved::Bytes(_) => {}
                nothing => return nothing,
            }
        }
        let taken = into.len().min(self.buffered().len());
        into[..taken].copy_from_slice(&self.buffered()[..taken]);
        self.consume(taken);
        Moved::Bytes(taken)
    }

    /// Reads up to `wanted` bytes of the open message into the buffer, which the reduction reads.
    pub(super) fn read_ahead(&mut self, wanted: usize) -> Moved {
        if self.buffered().len() < wanted { self.fill(wanted) } else { Moved::Bytes(0) }
    }

    /// Sends two pieces in order, as far as the link accepts them now.
    pub(super) fn send(&mut self, first: &[u8], second: &[u8]) -> Moved {
        let sent = match &mut self.shared {
            None => self.channel.send(first, second),
            Some(Shared { is_over: true, .. }) => Ok(0),
            Some(Shared { rings, .. }) => rings.send(first, second),
        };
        match self.outcome(sent) {
            // Unlike a read of zero bytes, a send of zero bytes does not mean the end of the stream.
            Moved::Closed if first.is_empty() && second.is_empty() => Moved::Bytes(0),
            other => other,
        }
    }

    /// Queues a control frame.
    pub(super) fn queue_control(&mut self, header: &Header, payload: &[u8]) {
        self.control.extend_from_slice(&header.encode());
        self.control.extend_from_slice(payload);
    }

    pub(super) fn has_control(&self) -> bool {
        !self.control.is_empty()
    }

    /// Sends queued control frames if no other frame is in transit. Returns `false` while some are left.
    pub(super) fn flush_control(&mut self) -> bool {
        while !self.control.is_empty() && !self.mid_frame {
            let control = std::mem::take(&mut self.control);
            match self.send(&control, &[]) {
                Moved::Bytes(n) => self.control = control[n..].to_vec(),
                Moved::WouldBlock => {
                    self.control = control;
                    return false;
                }
                // No peer is left to read them. If they stayed, a dead socket would be polled, which always reports news.
                Moved::Closed => {}
            }
        }
        self.control.is_empty() && self.flush()
    }

    /// Closes the connection, so that the other end notices that no more bytes follow.
    pub(super) fn cut(&mut self) {
        self.channel.shutdown(Shutdown::Both);
        self.closed.get_or_insert_with(|| "this rank closed the connection".into());
    }

    pub(super) fn rank(&self) -> Rank {
        self.peer.rank
    }

    /// Accepts a message that no call has asked for yet. Returns `false` when there is no room: then its sender waits.
    pub(super) fn begin_unexpected(&mut self, header: Header) -> bool {
        let held: usize = self.unexpected.iter().map(|message| message.bytes.len()).sum();
        if held > 0 && held + header.length > LIMIT {
            return false;
        }
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(header.length).is_err() {
            return false;
        }
        bytes.resize(header.length, 0);
        self.partial = Some(UnexpectedMessage { header, bytes, filled: 0 });
        true
    }

    /// Reads more of the begun message. Returns `true` once it is complete, or when none was begun.
    pub(super) fn continue_unexpected(&mut self) -> bool {
        let Some(mut message) = self.partial.take() else { return true };
        loop {
            let missing = message.bytes.len() - message.filled;
            let take = missing.min(self.buffered().len());
            message.bytes[message.filled..][..take].copy_from_slice(&self.buffered()[..take]);
            self.consume(take);
            message.filled += take;
            if message.filled == message.bytes.len() {
                self.unexpected.push_back(message);
                return true;
            }
            let Moved::Bytes(bytes) = self.read_into(&mut message.bytes[message.filled..]) else {
                self.partial = Some(message);
                return false;
            };
            message.filled += bytes;
        }
    }

    fn outcome(&mut self, result: io::Result<usize>) -> Moved {
        match result {
            Ok(n) if n > 0 => return Moved::Bytes(n),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                if self.shared.as_ref().is_none_or(|shared| !shared.is_over) {
                    return Moved::WouldBlock;
                }
            }
            Err(e) => {
                self.closed.get_or_insert_with(|| e.to_string());
            }
            Ok(_) => {}
        }
        self.closed.get_or_insert_with(|| "its end of the connection was closed".into());
        Moved::Closed
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::schedule::Algorithm;
    use crate::testing::member;
    use crate::types::dtype::DType;
    use crate::types::operation::{CallFingerprint, Operation};

    fn header(kind: Kind, length: usize) -> [u8; HEADER] {
        let fingerprint = CallFingerprint::new(Operation::AllGather, DType::U8, length);
        let (algorithm, rank) = (Algorithm::Direct, Rank(1));
        Header { kind, fingerprint, algorithm, sequence: 7, length, rank }.encode()
    }

    /// Returns a link, and its other end.
    fn link() -> (Link, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        (Link::new(member(Rank(1)), Channel::clear(here).unwrap()), there)
    }

    /// Returns all bytes that the link delivers, in order.
    fn rest(link: &mut Link) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let moved = link.fill(HEADER);
            all.extend(link.buffered());
            link.consume(link.buffered().len());
            if !matches!(moved, Moved::Bytes(1..)) {
                return all;
            }
        }
    }

    #[test]
    fn an_expected_message_goes_where_it_belongs_as_far_as_the_buffer_could_take_it() {
        for length in [1, SEGMENT, SEGMENT + 100] {
            let (mut link, mut there) = link();
            let payload: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            let expected = header(Kind::Data, length);
            let mut target = vec![255; length];
            assert_eq!(link.read_message(&expected, &mut target), Some(Moved::WouldBlock));
            there.write_all(&expected).unwrap();
            there.write_all(&payload).unwrap();
            let Some(Moved::Bytes(bytes)) = link.read_message(&expected, &mut target) else {
                panic!("{length} bytes: not read")
            };
            assert!(bytes > 0 && target[..bytes] == payload[..bytes], "{length} bytes");
            assert_eq!(rest(&mut link), payload[bytes..], "{length} bytes");
        }
    }

    #[test]
    fn what_is_not_the_expected_message_is_in_the_buffer_in_order() {
        let expected = header(Kind::Data, 100);
        let message = [&expected[..], &[3; 100]].concat();
        let query = header(Kind::Query, 0);
        let (longer, cut) = (header(Kind::Data, 101), &message[..HEADER - 1]);
        for first in [&query[..], &[&longer[..], &[4; 101]].concat(), &message[..1], cut] {
            let (mut link, mut there) = link();
            // The rest of a truncated header comes later.
            let (now, later) = if message.starts_with(first) {
                (first.to_vec(), message[first.len()..].to_vec())
            } else {
                ([first, &message].concat(), Vec::new())
            };
            there.write_all(&now).unwrap();
            assert_eq!(link.read_message(&expected, &mut [0; 100]), None);
            there.write_all(&later).unwrap();
            assert_eq!(link.read_message(&expected, &mut [0; 100]), None, "the buffer comes first");
            assert_eq!(rest(&mut link), [now, later].concat());
        }
        let (mut link, there) = link();
        drop(there);
        assert_eq!(link.read_message(&expected, &mut [0; 100]), None);
        assert!(link.closed.is_some());
    }
}
