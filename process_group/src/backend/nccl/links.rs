//! One quiet connection to each other member, beside NCCL's own.
//!
//! NCCL between the GPUs of a host does not notice that a process has died, and a kernel that waits for another rank waits
//! for ever. Over these links a rank hears at once that another is gone, says why it gives up itself, and learns how far
//! the others have come, so that the one that is missing can be named.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ledger::Claim;
use super::messages::{Exchange, Tally};
use crate::operation::Signature;
use crate::wire::signature;

const HEADER: usize = 16;
/// Longest reason sent.
const MAX_REASON: usize = 2048;
/// Most calls in a word.
pub(super) const MOST_CALLS: usize = MAX_REASON / signature::BYTES;

/// Bytes that wait for a socket's room, beyond which nothing is added.
const MOST_UNSENT: usize = 1 << 20;

/// What members tell each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Word {
    /// The sender is there, and makes the communicator.
    Hello,
    /// The sender leaves, with its part of everything done.
    Goodbye,
    /// The sender has enqueued this many collectives.
    Progress(u64),
    /// This collective has not ended in time at the sender, who gives up. Every member answers with its progress.
    Expired(u64, String),
    /// The sender gives up, and why.
    Aborted(String),
    /// What the sender has called.
    Made(Claim),
    /// What the sender has called, and that it will call nothing more.
    Last(Claim),
    /// The messages between the sender, who will exchange nothing more, and who hears this.
    Exchanged(Exchange),
    /// The sender's calls from this number on: because somebody has called something else, or because it leaves.
    Calls(u64, Vec<Signature>),
}

impl Word {
    fn encode(&self) -> Vec<u8> {
        let (kind, sequence, payload): (u8, u64, &[u8]) = match self {
            Self::Goodbye => (1, 0, &[]),
            Self::Progress(sequence) => (2, *sequence, &[]),
            Self::Expired(sequence, reason) => (3, *sequence, cut(reason)),
            Self::Aborted(reason) => (4, 0, cut(reason)),
            Self::Hello => (5, 0, &[]),
            Self::Made(claim) => (6, claim.sequence, &claim.digest.to_le_bytes()),
            Self::Last(claim) => (8, claim.sequence, &claim.digest.to_le_bytes()),
            Self::Exchanged(Exchange { sent, received }) => {
                let rest = [sent.bytes, received.messages, received.bytes];
                (9, sent.messages, &rest.map(u64::to_le_bytes).concat())
            }
            Self::Calls(first, calls) => {
                (7, *first, &calls.iter().flat_map(signature::pack).collect::<Vec<_>>())
            }
        };
        let mut bytes = vec![kind, 0, 0, 0];
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(sequence.to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    /// The first word of what has been received, and its length; none if it is not whole yet.
    fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
        let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        if length > MAX_REASON {
            return Err(format!("it announced a word of {length} bytes"));
        }
        let Some(payload) = bytes.get(HEADER..HEADER + length) else { return Ok(None) };
        let reason = || String::from_utf8_lossy(payload).into_owned();
        let sequence = header[8..].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        let unknown = || format!("it sent a word of kind {} that no rank of this version sends", header[0]);
        let word = match header[0] {
            1 => Self::Goodbye,
            2 => Self::Progress(sequence),
            3 => Self::Expired(sequence, reason()),
            4 => Self::Aborted(reason()),
            5 => Self::Hello,
            kind @ (6 | 8) => {
                let digest = u64::from_le_bytes(payload.try_into().map_err(|_| unknown())?);
                let claim = Claim { sequence, digest };
                if kind == 6 { Self::Made(claim) } else { Self::Last(claim) }
            }
            7 => {
                let (calls, rest) = payload.as_chunks();
                let calls = calls.iter().map(signature::unpack).collect::<Option<_>>();
                Self::Calls(sequence, calls.filter(|_| rest.is_empty()).ok_or_else(unknown)?)
            }
            9 => {
                let (numbers, rest) = payload.as_chunks();
                let &[sent, messages, bytes] = numbers else { return Err(unknown()) };
                if !rest.is_empty() {
                    return Err(unknown());
                }
                let [sent, messages, bytes] = [sent, messages, bytes].map(u64::from_le_bytes);
                Self::Exchanged(Exchange {
                    sent: Tally { messages: sequence, bytes: sent },
                    received: Tally { messages, bytes },
                })
            }
            _ => return Err(unknown()),
        };
        Ok(Some((word, HEADER + length)))
    }
}

/// As much of a reason as is sent.
fn cut(reason: &str) -> &[u8] {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason.as_bytes()[..end]
}

/// What came over a link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Heard {
    Said(Word),
    /// The connection is over without a goodbye.
    Lost(String),
}

struct Link {
    stream: Option<TcpStream>,
    received: Vec<u8>,
    /// What has been said and the socket has not taken yet.
    unsent: Vec<u8>,
    /// The other end has said goodbye.
    farewell: bool,
    /// Nothing more is sent.
    is_shut: bool,
}

/// The links of one member, by position in the group.
pub(super) struct Links {
    links: Vec<Link>,
}

impl Links {
    /// Takes what the data plane connected: non-blocking streams, none for this rank itself.
    pub(super) fn new(streams: Vec<Option<TcpStream>>) -> Self {
        let links = streams
            .into_iter()
            .map(|stream| Link {
                stream,
                received: Vec::new(),
                unsent: Vec::new(),
                farewell: false,
                is_shut: false,
            })
            .collect();
        Self { links }
    }

    /// Says a word to everybody who is still there. Never blocks: what a socket does not take waits until it does, up to a
    /// limit; a rank so far behind does not listen any more.
    pub(super) fn tell_all(&mut self, word: &Word) {
        let bytes = word.encode();
        self.links.iter_mut().for_each(|link| link.tell(&bytes));
    }

    /// Says a word to the member at one position, likewise.
    pub(super) fn tell(&mut self, position: usize, word: &Word) {
        self.links[position].tell(&word.encode());
    }

    /// Waits at most `patience` for something to come, and returns all of it with the positions it came from.
    pub(super) fn listen(&mut self, patience: Duration) -> Vec<(usize, Heard)> {
        let mut heard = Vec::new();
        let open: Vec<usize> = (0..self.links.len()).filter(|i| self.links[*i].stream.is_some()).collect();
        {
            let links = open.iter().map(|i| &self.links[*i]);
            let mut waiting: Vec<PollFd<'_>> = links.filter_map(Link::awaited).collect();
            let limit =
                Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
            if waiting.is_empty() {
                std::thread::sleep(patience);
            } else if poll(&mut waiting, Some(&limit)).is_err() {
                // Interrupted: the next round looks again.
                return heard;
            }
        }
        for position in open {
            self.links[position].flush();
            self.links[position].take(position, &mut heard);
        }
        heard
    }

    /// Ends the links behind what has been said. Reads on meanwhile, for a socket that is closed before it is read out takes
    /// back what it has sent.
    pub(super) fn close(mut self, patience: Duration) {
        let until = Instant::now() + patience;
        while self.links.iter().any(|link| link.stream.is_some()) && Instant::now() < until {
            for link in &mut self.links {
                if let Some(stream) = link.stream.as_ref().filter(|_| link.unsent.is_empty() && !link.is_shut)
                {
                    link.is_shut = true;
                    let _ = stream.shutdown(Shutdown::Write);
                }
            }
            self.listen(until.saturating_duration_since(Instant::now()));
        }
    }
}

impl Link {
    fn tell(&mut self, word: &[u8]) {
        if self.stream.is_some() && self.unsent.len() < MOST_UNSENT {
            self.unsent.extend(word);
            self.flush();
        }
    }

    /// What to wait for on it.
    fn awaited(&self) -> Option<PollFd<'_>> {
        let room = if self.unsent.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        Some(PollFd::from_borrowed_fd(self.stream.as_ref()?.as_fd(), PollFlags::IN | room))
    }

    /// Sends what has not been, as far as the socket takes it.
    fn flush(&mut self) {
        let Some(stream) = self.stream.as_mut().filter(|_| !self.unsent.is_empty()) else { return };
        let mut sent = 0;
        while sent < self.unsent.len() {
            match stream.write(&self.unsent[sent..]) {
                Ok(n) if n > 0 => sent += n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Ok(_) | Err(_) => {
                    // Half a word is worse than none: whoever reads, here or there, notices that the link is over.
                    let _ = stream.shutdown(Shutdown::Both);
                    sent = self.unsent.len();
                }
            }
        }
        self.unsent.drain(..sent);
    }

    fn take(&mut self, position: usize, heard: &mut Vec<(usize, Heard)>) {
        let Some(stream) = &mut self.stream else { return };
        let mut bytes = [0u8; 4096];
        let over = loop {
            match stream.read(&mut bytes) {
                Ok(0) => break Some("its connection closed".to_owned()),
                Ok(n) => self.received.extend_from_slice(&bytes[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Some(error.to_string()),
            }
        };
        let broken = loop {
            match Word::decode(&self.received) {
                Ok(Some((word, length))) => {
                    self.received.drain(..length);
                    self.farewell |= word == Word::Goodbye;
                    heard.push((position, Heard::Said(word)));
                }
                Ok(None) => break None,
                Err(why) => break Some(why),
            }
        };
        if let Some(why) = broken.or(over) {
            self.stream = None;
            if !self.farewell {
                heard.push((position, Heard::Lost(why)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::operation::Operation;
    use std::net::TcpListener;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn pair() -> (Links, Links) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        for stream in [&one, &other] {
            stream.set_nonblocking(true).unwrap();
        }
        (Links::new(vec![None, Some(one)]), Links::new(vec![Some(other), None]))
    }

    fn hear(links: &mut Links) -> Vec<(usize, Heard)> {
        for _ in 0..200 {
            let heard = links.listen(Duration::from_millis(50));
            if !heard.is_empty() {
                return heard;
            }
        }
        panic!("nothing came in ten seconds");
    }

    #[test]
    fn words_arrive_in_order_and_whole() {
        let (mut a, mut b) = pair();
        let long = "ä".repeat(MAX_REASON);
        let call = Signature { operation: Operation::Barrier, dtype: DType::U8, count: 0 };
        let words = [
            Word::Hello,
            Word::Progress(u64::MAX - 1),
            Word::Made(Claim { sequence: 3, digest: u64::MAX - 5 }),
            Word::Last(Claim { sequence: 4, digest: 1 }),
            Word::Exchanged(Exchange {
                sent: Tally { messages: 3, bytes: 1 << 40 },
                received: Tally { messages: 2, bytes: u64::MAX - 2 },
            }),
            Word::Calls(9, vec![call; MOST_CALLS]),
            Word::Expired(7, "call 7 took too long".into()),
            Word::Aborted(long.clone()),
        ];
        let mut heard = Vec::new();
        for word in &words {
            a.tell_all(word);
        }
        while heard.len() < words.len() {
            heard.extend(hear(&mut b));
        }
        for (heard, word) in heard.iter().zip(&words[..7]) {
            assert_eq!(*heard, (0, Heard::Said(word.clone())));
        }
        // A reason is cut at the limit, between characters.
        assert_eq!(heard[7], (0, Heard::Said(Word::Aborted("ä".repeat(MAX_REASON / 2)))));
    }

    #[test]
    fn an_end_without_a_goodbye_is_a_loss_and_one_with_it_is_not() {
        let (a, mut b) = pair();
        drop(a);
        assert_eq!(hear(&mut b), [(0, Heard::Lost("its connection closed".into()))]);
        let (mut a, mut b) = pair();
        // What the other said last, unread, does not take the goodbye with it.
        b.tell_all(&Word::Hello);
        a.tell_all(&Word::Goodbye);
        let there = std::thread::spawn(move || {
            let mut heard = Vec::new();
            while b.links[0].stream.is_some() {
                heard.extend(b.listen(Duration::from_secs(1)));
            }
            heard
        });
        let began = Instant::now();
        a.close(PATIENCE);
        assert!(began.elapsed() < PATIENCE, "the other end has not been seen");
        assert_eq!(there.join().unwrap(), [(0, Heard::Said(Word::Goodbye))]);
    }

    #[test]
    fn words_to_a_rank_that_does_not_listen_arrive_whole_once_it_does() {
        let (mut a, mut b) = pair();
        let call = Signature { operation: Operation::AllGather, dtype: DType::F32, count: 7 };
        let mut words = 0;
        let mut tell = |a: &mut Links| {
            a.tell_all(&Word::Calls(words, vec![call; MOST_CALLS]));
            words += 1;
        };
        // More than the sockets hold.
        while a.links[1].unsent.is_empty() {
            tell(&mut a);
        }
        (0..10).for_each(|_| tell(&mut a));
        a.tell_all(&Word::Last(Claim { sequence: 1, digest: 2 }));
        let mut heard = Vec::new();
        let until = Instant::now() + Duration::from_secs(30);
        while !matches!(heard.last(), Some((0, Heard::Said(Word::Last(_))))) {
            assert!(Instant::now() < until, "{} words have come", heard.len());
            assert!(a.listen(Duration::from_millis(1)).is_empty());
            heard.extend(b.listen(Duration::from_millis(1)));
        }
        assert_eq!(heard.len() as u64, words + 1);
        for (first, heard) in (0..).zip(&heard[..heard.len() - 1]) {
            assert_eq!(*heard, (0, Heard::Said(Word::Calls(first, vec![call; MOST_CALLS]))));
        }
    }

    #[test]
    fn nonsense_ends_a_link() {
        assert!(Word::decode(&[10; 15]).unwrap().is_none());
        assert!(Word::decode(&[10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(Word::decode(&[255; 16]).is_err());
        // Numbers of too few and too many bytes, and half a call.
        for (kind, length) in [(6, 4), (7, 8), (8, 9), (9, 0), (9, 8), (9, 16)] {
            let mut bytes = [0; 32];
            (bytes[0], bytes[4]) = (kind, length);
            assert!(Word::decode(&bytes).is_err(), "{kind}");
        }
    }
}
