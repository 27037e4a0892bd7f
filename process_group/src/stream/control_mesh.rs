//! One mostly idle connection to each other member, next to the library that moves the data.
//!
//! Between the GPUs of a host nothing breaks when a process dies, and a kernel that waits for another rank waits forever. Over
//! these links a rank learns at once that another is lost, sends the reason when it gives up itself, and learns the progress of the
//! other ranks, so that the missing one can be named.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;

use super::control_message::ControlMessage;
use crate::link::security::Channel;

/// Maximum number of bytes that wait for room in a socket. A rank that has not read for that long does not listen any more.
const MAX_UNSENT: usize = 1 << 20;

/// An event on a link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum PeerEvent {
    /// The member at the other end has sent a message.
    Message(ControlMessage),
    /// The connection has ended without a goodbye, for this reason.
    Lost(String),
}

struct Link {
    channel: Option<Channel>,
    received: Vec<u8>,
    /// Bytes that the socket has not accepted yet.
    unsent: Vec<u8>,
    /// True if the other end has said goodbye.
    goodbye: bool,
    /// True if nothing more is sent.
    is_shut: bool,
}

/// The links of one member to all others, by position in the group.
pub(super) struct ControlMesh {
    links: Vec<Link>,
}

impl ControlMesh {
    /// Creates the mesh from connected, non-blocking channels; none for this rank itself.
    pub(super) fn new(channels: Vec<Option<Channel>>) -> Self {
        let links = channels
            .into_iter()
            .map(|channel| Link {
                channel,
                received: Vec::new(),
                unsent: Vec::new(),
                goodbye: false,
                is_shut: false,
            })
            .collect();
        Self { links }
    }

    /// Sends a message to all members that are still connected. Never blocks.
    pub(super) fn broadcast(&mut self, message: &ControlMessage) {
        let bytes = message.encode();
        for link in &mut self.links {
            link.send(&bytes);
        }
    }

    /// Sends a message to the member at one position. Never blocks.
    pub(super) fn send(&mut self, position: usize, message: &ControlMessage) {
        self.links[position].send(&message.encode());
    }

    /// Waits at most `timeout` for events, and returns all of them with their positions.
    pub(super) fn listen(&mut self, timeout: Duration) -> Vec<(usize, PeerEvent)> {
        let mut events = Vec::new();
        let open: Vec<usize> = (0..self.links.len()).filter(|i| self.links[*i].channel.is_some()).collect();
        {
            let links = open.iter().map(|i| &self.links[*i]);
            let mut waiting: Vec<PollFd<'_>> = links.filter_map(Link::poll_fd).collect();
            let limit =
                Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
            if waiting.is_empty() {
                std::thread::sleep(timeout);
            } else if poll(&mut waiting, Some(&limit)).is_err() {
                // Interrupted: the next round looks again.
                return events;
            }
        }
        for position in open {
            self.links[position].flush();
            self.links[position].receive(position, &mut events);
        }
        events
    }

    /// Closes the links after the sent bytes. Continues to read in the meantime: a socket that is closed with unread bytes discards
    /// its sent ones.
    pub(super) fn close(mut self, timeout: Duration) {
        let until = Instant::now() + timeout;
        while self.links.iter().any(|link| link.channel.is_some()) && Instant::now() < until {
            for link in &mut self.links {
                let has_sent_all = link.unsent.is_empty() && !link.is_shut;
                if let Some(channel) =
                    link.channel.as_ref().filter(|channel| has_sent_all && !channel.has_unsent())
                {
                    link.is_shut = true;
                    channel.shutdown(Shutdown::Write);
                }
            }
            self.listen(until.saturating_duration_since(Instant::now()));
        }
    }
}

impl Link {
    fn send(&mut self, message: &[u8]) {
        if self.channel.is_some() && self.unsent.len() < MAX_UNSENT {
            self.unsent.extend(message);
            self.flush();
        }
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        let channel = self.channel.as_ref()?;
        let is_done = self.unsent.is_empty() && !channel.has_unsent();
        let room = if is_done { PollFlags::empty() } else { PollFlags::OUT };
        Some(PollFd::from_borrowed_fd(channel.socket().as_fd(), PollFlags::IN | room))
    }

    /// Sends as many of the unsent bytes as the socket accepts.
    fn flush(&mut self) {
        let Some(channel) = &mut self.channel else { return };
        let mut sent = 0;
        while sent < self.unsent.len() {
            match channel.send(&self.unsent[sent..], &[]) {
                Ok(n) if n > 0 => sent += n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Ok(_) | Err(_) => {
                    // Half a message is worse than none: both ends notice that the link has ended.
                    channel.shutdown(Shutdown::Both);
                    sent = self.unsent.len();
                }
            }
        }
        self.unsent.drain(..sent);
        if channel.flush().is_err() {
            channel.shutdown(Shutdown::Both);
        }
    }

    fn receive(&mut self, position: usize, events: &mut Vec<(usize, PeerEvent)>) {
        let Some(channel) = &mut self.channel else { return };
        let mut bytes = [0u8; 4096];
        let over = loop {
            match channel.read(&mut bytes) {
                Ok(0) => break Some("its connection closed".to_owned()),
                Ok(n) => self.received.extend_from_slice(&bytes[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Some(error.to_string()),
            }
        };
        let malformed = loop {
            match ControlMessage::decode(&self.received) {
                Ok(Some((message, length))) => {
                    self.received.drain(..length);
                    self.goodbye |= message == ControlMessage::Goodbye;
                    events.push((position, PeerEvent::Message(message)));
                }
                Ok(None) => break None,
                Err(malformed) => break Some(malformed.to_string()),
            }
        };
        if let Some(why) = malformed.or(over) {
            self.channel = None;
            if !self.goodbye {
                events.push((position, PeerEvent::Lost(why)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::super::call_log::LogHead;
    use super::super::control_message::MAX_CALLS;
    use super::super::control_message::tests::one_of_each;
    use super::*;
    use crate::types::dtype::DType;
    use crate::types::operation::{CallFingerprint, Operation};

    const PATIENCE: Duration = Duration::from_secs(60);

    fn pair() -> (ControlMesh, ControlMesh) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        let [one, other] = [one, other].map(|stream| Some(Channel::clear(stream).unwrap()));
        (ControlMesh::new(vec![None, one]), ControlMesh::new(vec![other, None]))
    }

    fn hear(mesh: &mut ControlMesh) -> Vec<(usize, PeerEvent)> {
        for _ in 0..200 {
            let events = mesh.listen(Duration::from_millis(50));
            if !events.is_empty() {
                return events;
            }
        }
        panic!("nothing came in ten seconds");
    }

    #[test]
    fn messages_arrive_in_order_and_complete() {
        let (mut a, mut b) = pair();
        let messages = one_of_each();
        for message in &messages {
            a.broadcast(message);
        }
        let mut heard = Vec::new();
        while heard.len() < messages.len() {
            heard.extend(hear(&mut b));
        }
        let expected: Vec<_> = messages.into_iter().map(|m| (0, PeerEvent::Message(m))).collect();
        assert_eq!(heard, expected);
    }

    #[test]
    fn an_end_without_a_goodbye_is_a_loss_and_one_with_it_is_not() {
        let (a, mut b) = pair();
        drop(a);
        assert_eq!(hear(&mut b), [(0, PeerEvent::Lost("its connection closed".into()))]);
        let (mut a, mut b) = pair();
        // The last, unread message of the other end does not destroy the goodbye.
        b.broadcast(&ControlMessage::Hello);
        a.broadcast(&ControlMessage::Goodbye);
        let there = std::thread::spawn(move || {
            let mut heard = Vec::new();
            while b.links[0].channel.is_some() {
                heard.extend(b.listen(Duration::from_secs(1)));
            }
            heard
        });
        let began = Instant::now();
        a.close(PATIENCE);
        assert!(began.elapsed() < PATIENCE, "the other end has not been seen");
        assert_eq!(there.join().unwrap(), [(0, PeerEvent::Message(ControlMessage::Goodbye))]);
    }

    #[test]
    fn messages_to_a_rank_that_does_not_listen_arrive_complete_once_it_does() {
        let (mut a, mut b) = pair();
        let call = CallFingerprint::new(Operation::AllGather, DType::F32, 7);
        let mut sent = 0;
        let mut send = |a: &mut ControlMesh| {
            a.broadcast(&ControlMessage::Calls(sent, vec![call; MAX_CALLS]));
            sent += 1;
        };
        // This is more than the sockets can buffer.
        while a.links[1].unsent.is_empty() {
            send(&mut a);
        }
        for _ in 0..10 {
            send(&mut a);
        }
        a.broadcast(&ControlMessage::LastHead(LogHead { sequence: 1, digest: 2 }));
        let mut heard = Vec::new();
        let until = Instant::now() + Duration::from_secs(30);
        while !matches!(heard.last(), Some((0, PeerEvent::Message(ControlMessage::LastHead(_))))) {
            assert!(Instant::now() < until, "{} messages have come", heard.len());
            assert!(a.listen(Duration::from_millis(1)).is_empty());
            heard.extend(b.listen(Duration::from_millis(1)));
        }
        assert_eq!(heard.len() as u64, sent + 1);
        for (first, heard) in (0..).zip(&heard[..heard.len() - 1]) {
            let expected = ControlMessage::Calls(first, vec![call; MAX_CALLS]);
            assert_eq!(*heard, (0, PeerEvent::Message(expected)));
        }
    }

    #[test]
    fn a_malformed_message_is_a_loss() {
        let (mut a, mut b) = pair();
        a.links[1].send(&[200; 32]);
        assert!(matches!(&hear(&mut b)[..], [(0, PeerEvent::Lost(why))] if why.contains("control message")));
    }
}
