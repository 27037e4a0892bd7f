//! One quiet connection to each other member, beside NCCL's own.
//!
//! NCCL between the GPUs of a host does not notice that a process has died, and a kernel that waits for another rank waits
//! for ever. Over these links a rank hears at once that another is gone, says why it gives up itself, and learns how far
//! the others have come, so that the one that is missing can be named.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

const HEADER: usize = 16;
/// Longest reason sent.
const MAX_REASON: usize = 2048;

/// What members tell each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Word {
    /// The sender is there, and makes the communicator.
    Hello,
    /// The sender leaves, with everything done.
    Goodbye,
    /// The sender has enqueued this many collectives.
    Progress(u64),
    /// This collective has not ended in time at the sender, who gives up. Every member answers with its progress.
    Expired(u64, String),
    /// The sender gives up, and why.
    Aborted(String),
}

impl Word {
    fn encode(&self) -> Vec<u8> {
        let (kind, sequence, reason) = match self {
            Self::Goodbye => (1u8, 0, ""),
            Self::Progress(sequence) => (2, *sequence, ""),
            Self::Expired(sequence, reason) => (3, *sequence, reason.as_str()),
            Self::Aborted(reason) => (4, 0, reason.as_str()),
            Self::Hello => (5, 0, ""),
        };
        let mut end = reason.len().min(MAX_REASON);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = vec![kind, 0, 0, 0];
        bytes.extend((end as u32).to_le_bytes());
        bytes.extend(sequence.to_le_bytes());
        bytes.extend(&reason.as_bytes()[..end]);
        bytes
    }

    /// The first word of what has been received, and its length; none if it is not whole yet.
    fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
        let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        if length > MAX_REASON {
            return Err(format!("it announced a word of {length} bytes"));
        }
        let Some(reason) = bytes.get(HEADER..HEADER + length) else { return Ok(None) };
        let reason = String::from_utf8_lossy(reason).into_owned();
        let sequence = header[8..].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        let word = match header[0] {
            1 => Self::Goodbye,
            2 => Self::Progress(sequence),
            3 => Self::Expired(sequence, reason),
            4 => Self::Aborted(reason),
            5 => Self::Hello,
            other => return Err(format!("it sent a word of unknown kind {other}")),
        };
        Ok(Some((word, HEADER + length)))
    }
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
    farewell: bool,
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
            .map(|stream| Link { stream, received: Vec::new(), farewell: false })
            .collect();
        Self { links }
    }

    /// Says a word to everybody who is still there. Never blocks: words are small and few, and a link whose buffer is
    /// full belongs to a rank that does not listen any more.
    pub(super) fn tell_all(&mut self, word: &Word) {
        let bytes = word.encode();
        for link in &mut self.links {
            if let Some(stream) = &mut link.stream {
                let _ = stream.write_all(&bytes);
            }
        }
    }

    /// Waits at most `patience` for something to come, and returns all of it with the positions it came from.
    pub(super) fn listen(&mut self, patience: Duration) -> Vec<(usize, Heard)> {
        let mut heard = Vec::new();
        let open: Vec<usize> = (0..self.links.len()).filter(|i| self.links[*i].stream.is_some()).collect();
        {
            let streams = open.iter().filter_map(|i| self.links[*i].stream.as_ref());
            let mut waiting: Vec<PollFd<'_>> =
                streams.map(|s| PollFd::from_borrowed_fd(s.as_fd(), PollFlags::IN)).collect();
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
            self.links[position].take(position, &mut heard);
        }
        heard
    }
}

impl Link {
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
    use std::net::TcpListener;

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
        let words = [
            Word::Hello,
            Word::Progress(u64::MAX - 1),
            Word::Expired(7, "call 7 took too long".into()),
            Word::Aborted(long.clone()),
        ];
        let mut heard = Vec::new();
        for word in &words {
            a.tell_all(word);
        }
        while heard.len() < 4 {
            heard.extend(hear(&mut b));
        }
        for (heard, word) in heard.iter().zip(&words[..3]) {
            assert_eq!(*heard, (0, Heard::Said(word.clone())));
        }
        // A reason is cut at the limit, between characters.
        assert_eq!(heard[3], (0, Heard::Said(Word::Aborted("ä".repeat(MAX_REASON / 2)))));
    }

    #[test]
    fn an_end_without_a_goodbye_is_a_loss_and_one_with_it_is_not() {
        let (a, mut b) = pair();
        drop(a);
        assert_eq!(hear(&mut b), [(0, Heard::Lost("its connection closed".into()))]);
        let (mut a, mut b) = pair();
        a.tell_all(&Word::Goodbye);
        drop(a);
        assert_eq!(hear(&mut b), [(0, Heard::Said(Word::Goodbye))]);
        assert!(b.listen(Duration::from_millis(20)).is_empty());
    }

    #[test]
    fn nonsense_ends_a_link() {
        assert!(Word::decode(&[9; 15]).unwrap().is_none());
        assert!(Word::decode(&[9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(Word::decode(&[255; 16]).is_err());
    }
}
