//! Two ranks' ends of one pair of rings.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::byte_queue::RING;
use super::*;
use crate::testing::{LATE, in_time};

/// Returns both ranks of a host, after each has opened the segment of the other.
pub(in crate::cpu) fn pair(has_sockets: bool) -> [(ByteQueues, Doorbell); 2] {
    let [a, b] = [0, 1].map(|place| ExportedSegment::new(place, 2, has_sockets).unwrap());
    let (of_a, of_b) = (a.handle(), b.handle());
    let (at_a, at_b) = (a.open(&of_b, 1).unwrap(), b.open(&of_a, 0).unwrap());
    [(at_a, a.close()), (at_b, b.close())]
}

impl ByteQueues {
    /// Writes positions that the other end must reject.
    pub(in crate::cpu) fn lie(&self, position: u64) {
        let Self { out, into, .. } = self;
        out.segment.double_word(out.control + byte_queue::HEAD).store(position, SeqCst);
        into.segment.double_word(into.control + byte_queue::TAIL).store(position, SeqCst);
    }
}

/// Longer than a test may take: only a doorbell ends such a sleep in time.
const ENDLESS: Duration = Duration::from_secs(3600);

/// Reads until `len` bytes have arrived, and sleeps in between.
fn read_all(rings: &mut ByteQueues, doorbell: &Doorbell, len: usize) -> Vec<u8> {
    let mut all = vec![0; len];
    let (mut done, until) = (0, Instant::now() + LATE);
    while done < len {
        match rings.read_pair(&mut all[done..], &mut []) {
            Ok(bytes) => done += bytes,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                assert!(Instant::now() < until, "{done} of {len} bytes came");
                doorbell.sleep(ENDLESS, Vec::new(), || rings.has_unread()).unwrap();
            }
        }
    }
    all
}

#[test]
fn bytes_come_as_they_were_sent_and_either_end_is_woken() {
    bytes_come(pair(false));
}

#[test]
fn bytes_come_to_a_rank_that_waits_for_sockets_too() {
    bytes_come(pair(true));
}

fn bytes_come(pair: [(ByteQueues, Doorbell); 2]) {
    const TOTAL: usize = 16 * RING;
    let [(mut rings, doorbell), (mut theirs, their_bell)] = pair;
    let sent: Vec<u8> = (0..TOTAL as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let expected = sent.clone();
    let writer = std::thread::spawn(move || {
        let (mut done, mut len) = (0, 1);
        while done < TOTAL {
            let piece = &sent[done..TOTAL.min(done + len)];
            let (first, second) = piece.split_at(piece.len().min(48));
            match rings.send(first, second) {
                Ok(bytes) => (done, len) = (done + bytes, len * 3 % 300_007 + 1),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    doorbell.sleep(ENDLESS, Vec::new(), || rings.has_room()).unwrap();
                }
            }
        }
    });
    let received = in_time(move || read_all(&mut theirs, &their_bell, TOTAL));
    writer.join().unwrap();
    assert!(received == expected);
}

#[test]
fn a_rank_that_waits_for_sockets_too_is_woken_by_one() {
    let [(rings, doorbell), _] = pair(true);
    let (mut reader, writer) = std::io::pipe().unwrap();
    let woken = std::thread::spawn(move || {
        let socket = vec![PollFd::new(&reader, PollFlags::IN)];
        doorbell.sleep(ENDLESS, socket, || rings.has_unread()).unwrap();
        reader.read_exact(&mut [0]).unwrap();
    });
    (&writer).write_all(&[1]).unwrap();
    in_time(move || woken.join().unwrap());
}

#[test]
fn a_bell_without_a_pipe_waits_for_descriptors_too() {
    let [(rings, doorbell), _] = pair(false);
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[1]).unwrap();
    in_time(move || {
        doorbell.sleep(ENDLESS, vec![PollFd::new(&reader, PollFlags::IN)], || rings.has_unread()).unwrap();
    });
}

#[test]
fn a_bell_that_is_no_pipe_is_refused() {
    let [a, b] = [0, 1].map(|place| ExportedSegment::new(place, 2, true).unwrap());
    let file = tempfile::tempfile().unwrap();
    let lie = SegmentHandle { pipe: file.as_raw_fd() as u32 + 1, ..b.handle() };
    assert!(a.open(&lie, 1).unwrap_err().to_string().contains("not that of `pipe:`"));
}

#[test]
fn whatever_a_peer_writes_into_the_positions_is_an_error_at_most() {
    for lie in [u64::MAX / 2, 1 << 40, RING as u64 + 1] {
        let [(mut mine, _), (theirs, _)] = pair(false);
        theirs.lie(lie);
        assert!(mine.has_unread() && mine.has_room(), "there is something to find out");
        // The writer looks when it needs to know.
        let more_than_fits = vec![0; 2 * RING];
        let outcomes = [mine.read_pair(&mut [0; 9], &mut []), mine.send(&[1], &more_than_fits)];
        for error in outcomes.map(Result::unwrap_err) {
            assert!(error.to_string().contains("out of range"), "{error}");
        }
    }
}

#[test]
fn an_announced_processor_counts_once() {
    let [(mut mine, _), (mut theirs, _)] = pair(false);
    assert_eq!(mine.exchange_processors(0), None, "the peer has announced nothing, and not processor 0");
    assert_eq!(theirs.exchange_processors(0), Some(0));
    assert_eq!(theirs.exchange_processors(0), None, "it has been taken");
    assert_eq!(mine.exchange_processors(0), Some(0), "of several announcements, the last counts");
    assert_eq!(theirs.exchange_processors(1), Some(0), "another processor");
    assert_eq!(mine.exchange_processors(1), Some(1));
}

#[test]
fn a_segment_with_another_token_is_refused() {
    let [a, b] = [0, 1].map(|place| ExportedSegment::new(place, 2, false).unwrap());
    let lie = SegmentHandle { token: [9; 32], ..b.handle() };
    assert!(a.open(&lie, 1).unwrap_err().to_string().contains("not the memory"));
}
