//! One connection to one peer: buffered reading, and what must not cut into a frame that is being sent.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::cross_memory;
use super::data_plane::Connection;
use crate::rank::Rank;
use crate::roster::Member;
use crate::wire::frame::{HEADER, Header, MAX_REASON};

/// Bytes of messages that came before anybody asked for them; beyond, the sender waits.
const INBOX_LIMIT: usize = 256 << 20;

/// A message between two ranks that nobody has asked for yet.
#[derive(Debug)]
pub(super) struct Letter {
    pub(super) header: Header,
    pub(super) bytes: Vec<u8>,
    /// Bytes that are there.
    pub(super) filled: usize,
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: Member,
    stream: TcpStream,
    rx: Vec<u8>,
    rx_start: usize,
    rx_end: usize,
    /// The next frame's header, read and not yet used.
    pub(super) header: Option<Header>,
    /// The peer's process, if its memory can be read from here.
    pub(super) readable: Option<u32>,
    /// Messages that wait in the peer's memory, oldest first. All came before `header`.
    pub(super) offers: VecDeque<Header>,
    /// What was read of the peer's memory to be folded.
    staging: Vec<u8>,
    /// The other end has closed, and how.
    pub(super) closed: Option<String>,
    /// The other end has said that it leaves in good order.
    pub(super) goodbye: bool,
    /// Highest collective that the peer is known to have come to; making the group is number 0.
    pub(super) seen: Option<u64>,
    /// The peer has answered our question.
    pub(super) answered: bool,
    /// Bytes of the current frame's header that have been sent; the payload follows.
    pub(super) header_sent: usize,
    /// A frame has been begun and not finished: nothing else may be sent.
    pub(super) mid_frame: bool,
    /// Control frames to go at the next frame boundary.
    control: Vec<u8>,
    pub(super) inbox: VecDeque<Letter>,
    pub(super) partial: Option<Letter>,
}

/// What became of an attempt to move bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moved {
    Bytes(usize),
    WouldBlock,
    Closed,
}

impl Link {
    pub(super) fn new(peer: Member, connection: Connection, segment: usize) -> Self {
        let Connection { stream, readable } = connection;
        Self {
            peer,
            stream,
            readable,
            offers: VecDeque::new(),
            staging: Vec::new(),
            // A control frame must fit whole.
            rx: vec![0; segment.max(HEADER + MAX_REASON) + HEADER],
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
            inbox: VecDeque::new(),
            partial: None,
        }
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Bytes read ahead.
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

    /// Reads what has come into the buffer.
    pub(super) fn fill(&mut self) -> Moved {
        if self.rx_end == self.rx.len() {
            if self.rx_start == 0 {
                return Moved::Bytes(0);
            }
            self.rx.copy_within(self.rx_start..self.rx_end, 0);
            (self.rx_start, self.rx_end) = (0, self.rx_end - self.rx_start);
        }
        let moved = outcome((&self.stream).read(&mut self.rx[self.rx_end..]), &mut self.closed);
        if let Moved::Bytes(n) = moved {
            self.rx_end += n;
        }
        moved
    }

    /// Reads past the (empty) buffer into `target`, and what lies behind it into the buffer.
    pub(super) fn read_into(&mut self, target: &mut [u8]) -> Moved {
        debug_assert!(self.rx_start == self.rx_end);
        (self.rx_start, self.rx_end) = (0, 0);
        let wanted = target.len();
        // Just enough for the next header, so that payloads keep going where they belong.
        let mut slices = [IoSliceMut::new(target), IoSliceMut::new(&mut self.rx[..HEADER])];
        match outcome((&self.stream).read_vectored(&mut slices), &mut self.closed) {
            Moved::Bytes(n) if n > wanted => {
                self.rx_end = n - wanted;
                Moved::Bytes(wanted)
            }
            other => other,
        }
    }

    /// Copies from the peer's memory at `address`.
    ///
    /// # Errors
    /// Says why that memory cannot be read, which no longer should happen once it could.
    pub(super) fn fetch(&self, address: u64, into: &mut [u8]) -> Result<(), String> {
        let pid = self.readable.ok_or("its memory cannot be read from here")?;
        cross_memory::read(pid, address, into).map_err(|e| format!("its memory cannot be read any more: {e}"))
    }

    /// [`fetch`](Self::fetch)es into memory of this link's own.
    pub(super) fn stage(&mut self, address: u64, bytes: usize) -> Result<(), String> {
        let mut staging = std::mem::take(&mut self.staging);
        if staging.len() < bytes {
            staging.resize(bytes, 0);
        }
        let fetched = self.fetch(address, &mut staging[..bytes]);
        self.staging = staging;
        fetched
    }

    /// What was [`stage`](Self::stage)d last.
    pub(super) fn staged(&self) -> &[u8] {
        &self.staging
    }

    /// Takes a header from the buffer, if one is there whole. `Err` for bytes that are no header.
    pub(super) fn parse_header(&mut self) -> Result<Option<Header>, ()> {
        let Some(bytes) = self.buffered().first_chunk::<HEADER>() else { return Ok(None) };
        let header = Header::decode(bytes).ok_or(())?;
        self.consume(HEADER);
        Ok(Some(header))
    }

    /// Sends two pieces, in order, as far as they go now.
    pub(super) fn send(&mut self, first: &[u8], second: &[u8]) -> Moved {
        let slices = [IoSlice::new(first), IoSlice::new(second)];
        // No signal when the peer has gone: the error says it.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut ancillary = SendAncillaryBuffer::default();
        let sent = rustix::net::sendmsg(&self.stream, &slices, &mut ancillary, flags);
        match outcome(sent.map_err(io::Error::from), &mut self.closed) {
            // Zero bytes sent is not the end of a stream as zero bytes read is.
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

    /// Sends queued control frames if no other frame is under way. `false` while some are left.
    pub(super) fn flush_control(&mut self) -> bool {
        while !self.control.is_empty() && !self.mid_frame {
            let control = std::mem::take(&mut self.control);
            match self.send(&control, &[]) {
                Moved::Bytes(n) => self.control = control[n..].to_vec(),
                Moved::WouldBlock => {
                    self.control = control;
                    return false;
                }
                // Nobody is there to read them. Kept, they would have a dead socket polled, which always has news.
                Moved::Closed => {}
            }
        }
        self.control.is_empty()
    }

    /// Takes in a message that nobody has asked for. `false` when there is no room: then its sender waits.
    pub(super) fn begin_letter(&mut self, header: Header) -> bool {
        let held: usize = self.inbox.iter().map(|l| l.bytes.len()).sum();
        if held > 0 && held + header.length > INBOX_LIMIT {
            return false;
        }
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(header.length).is_err() {
            return false;
        }
        bytes.resize(header.length, 0);
        self.partial = Some(Letter { header, bytes, filled: 0 });
        true
    }

    /// Reads more of the message begun. `true` once it is in the inbox.
    pub(super) fn continue_letter(&mut self) -> bool {
        let Some(mut letter) = self.partial.take() else { return true };
        loop {
            let missing = letter.bytes.len() - letter.filled;
            let take = missing.min(self.buffered().len());
            letter.bytes[letter.filled..][..take].copy_from_slice(&self.buffered()[..take]);
            self.consume(take);
            letter.filled += take;
            if letter.filled == letter.bytes.len() {
                self.inbox.push_back(letter);
                return true;
            }
            let moved = self.read_into(&mut letter.bytes[letter.filled..]);
            let Moved::Bytes(n) = moved else {
                self.partial = Some(letter);
                return false;
            };
            letter.filled += n;
        }
    }

    /// Makes the other end notice, without a word, that no more will come.
    pub(super) fn cut(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.closed.get_or_insert_with(|| "this rank closed the connection".into());
    }

    pub(super) fn rank(&self) -> Rank {
        self.peer.rank
    }
}

fn outcome(result: io::Result<usize>, closed: &mut Option<String>) -> Moved {
    match result {
        Ok(0) => {
            closed.get_or_insert_with(|| "its end of the connection was closed".into());
            Moved::Closed
        }
        Ok(n) => Moved::Bytes(n),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Moved::WouldBlock
        }
        Err(e) => {
            closed.get_or_insert_with(|| e.to_string());
            Moved::Closed
        }
    }
}

/// How long to look for news without sleeping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Since the last news.
    pub(super) spin: std::time::Duration,
    /// Give the processor to others in between, because ranks share it.
    pub(super) yields: bool,
}

impl Patience {
    /// Whether to look again at once, as one does until `until` at most.
    pub(super) fn look_again(&self, idle_since: Instant, until: Instant) -> bool {
        let now = Instant::now();
        if now.saturating_duration_since(idle_since) >= self.spin || now >= until {
            return false;
        }
        if self.yields {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        true
    }
}
