//! The executor on a transport of another kind: payloads go through bounded queues that the ranks share, neither behind
//! their headers nor read where they lie.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Outgoing, Sent, Transport};
use crate::backend::host::compiled::Compiled;
use crate::backend::host::control;
use crate::backend::host::executor::{Context, History, Progress, Run, Spaces};
use crate::backend::host::link::{Link, Moved};
use crate::backend::host::spin::SpinPolicy;
use crate::backend::host::tests::member;
use crate::dtype::DType;
use crate::mesh::{Peer, Peers};
use crate::operation::{CallFingerprint, Operation, ReduceOp};
use crate::rank::Rank;
use crate::schedule::Algorithm;
use crate::schedule::Hosts;
use crate::schedule::build::{Agreement, CollectiveSpec};
use crate::security::Channel;
use crate::sync::lock;
use crate::testing::{LATE, in_time};
use crate::wire::frame::{Header, Kind};

/// Bytes that fit a queue: less than a message.
const CAPACITY: usize = 1000;

type Queue = Arc<Mutex<VecDeque<u8>>>;

/// One rank's ends of its queues.
struct Queues(Peers<Ends>);

struct Ends {
    out: Queue,
    into: Queue,
    /// The message to this peer has been announced and not sent whole.
    begun: bool,
    staging: Vec<u8>,
}

impl Ends {
    /// Takes up to `most` bytes out of the incoming queue.
    fn take(&self, most: usize) -> Vec<u8> {
        let mut queue = lock(&self.into);
        let there = queue.len().min(most);
        queue.drain(..there).collect()
    }
}

impl Transport for Queues {
    type Error = Infallible;
    const IN_BAND: bool = false;
    const ZERO_COPY: bool = false;
    const NAP: Option<Duration> = Some(Duration::from_micros(100));

    fn send(&mut self, peer: Peer, link: &mut Link, message: &Outgoing<'_>) -> Sent {
        let ends = &mut self.0[peer];
        if !std::mem::replace(&mut ends.begun, true) {
            link.queue_control(&Header { kind: Kind::ReadyToSend, ..message.header }, &[]);
        }
        let mut queue = lock(&ends.out);
        let bytes = message.payload.len().min(CAPACITY - queue.len());
        queue.extend(&message.payload[..bytes]);
        if bytes == message.left {
            ends.begun = false;
            return Sent::Complete;
        }
        if bytes == message.payload.len() { Sent::Part(bytes) } else { Sent::Full(bytes) }
    }

    fn open(&mut self, _: Peer, _: &Header) {}

    fn receive(&mut self, peer: Peer, _: &mut Link, _: usize, into: &mut [u8]) -> Result<Moved, Infallible> {
        let taken = self.0[peer].take(into.len());
        into[..taken.len()].copy_from_slice(&taken);
        Ok(if taken.is_empty() && !into.is_empty() { Moved::WouldBlock } else { Moved::Bytes(taken.len()) })
    }

    fn read_ahead(&mut self, peer: Peer, _: &mut Link, wanted: usize) -> Moved {
        let ends = &mut self.0[peer];
        let taken = ends.take(wanted.saturating_sub(ends.staging.len()));
        ends.staging.extend(&taken);
        Moved::Bytes(taken.len())
    }

    fn stage(&mut self, peer: Peer, _: &mut Link, _: usize, most: usize) -> Result<usize, Infallible> {
        Ok(self.0[peer].staging.len().min(most))
    }

    fn staged<'a>(&'a self, peer: Peer, _: &'a Link) -> &'a [u8] {
        &self.0[peer].staging
    }

    fn consume(&mut self, peer: Peer, _: &mut Link, bytes: usize) {
        self.0[peer].staging.drain(..bytes);
    }
}

/// The ends of a group of `n` ranks: links and queues.
fn group(n: usize) -> Vec<(Peers<Link>, Queues)> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut streams: HashMap<(usize, usize), TcpStream> = HashMap::new();
    let mut queues: HashMap<(usize, usize), Queue> = HashMap::new();
    for (a, b) in (0..n).flat_map(|a| (0..a).map(move |b| (a, b))) {
        streams.insert((a, b), TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        streams.insert((b, a), listener.accept().unwrap().0);
        queues.insert((a, b), Queue::default());
        queues.insert((b, a), Queue::default());
    }
    let mut rank = |me| {
        let links = Peers::from_fn(me, n, |peer| {
            let stream = streams.remove(&(me, peer)).unwrap();
            let channel = Channel::clear(stream.try_into().unwrap());
            Link::new(member(Rank(peer as u32)), channel, 4096)
        });
        let queues = Peers::from_fn(me, n, |peer| Ends {
            out: Arc::clone(&queues[&(me, peer)]),
            into: Arc::clone(&queues[&(peer, me)]),
            begun: false,
            staging: Vec::new(),
        });
        (links, Queues(queues))
    };
    (0..n).map(&mut rank).collect()
}

/// Two all-reduces in place, one after the other: the sums of both.
fn all_reduces(
    rank: usize,
    n: usize,
    algorithm: Algorithm,
    (mut links, mut queues): (Peers<Link>, Queues),
) -> Vec<u32> {
    // Too long to be sent whole.
    const COUNT: usize = 5000;
    let fingerprint =
        CallFingerprint { operation: Operation::AllReduce(ReduceOp::Sum), dtype: DType::U32, count: COUNT };
    let spec = CollectiveSpec {
        operation: fingerprint.operation,
        algorithm,
        count: COUNT,
        in_place: true,
        zero_copy: Queues::ZERO_COPY,
        agreement: Agreement::Pairwise,
    };
    let compiled = Compiled::new(spec, rank, &Hosts::one(n));
    let mut progress = Progress::new(rank, n);
    let mut history = History::default();
    let mut sums: Vec<u32> = (0..COUNT).map(|i| ((rank + 1) * i) as u32).collect();
    for sequence in 1..=2 {
        history.push(sequence, fingerprint);
        let run = Run {
            context: Context {
                group: "queues",
                rank: Rank(rank as u32),
                global_rank: Rank(rank as u32),
                segment: 4096,
                spin: SpinPolicy { limit: Duration::ZERO, yields: true },
                bell: None,
                history: &history,
                liveness: None,
                interrupt: None,
            },
            links: &mut links,
            transport: &mut queues,
            compiled: &compiled,
            fingerprint,
            sequence,
            deadline: Instant::now() + LATE,
            spaces: Spaces { input: None, output: bytemuck::cast_slice_mut(&mut sums), scratch: &mut [] },
            progress: &mut progress,
        };
        run.run().unwrap();
    }
    for link in links.iter_mut() {
        link.queue_control(&control(Kind::Goodbye, Rank(rank as u32), 0), &[]);
        assert!(link.flush_control());
    }
    sums
}

#[test]
fn the_executor_takes_a_transport_that_it_does_not_know() {
    for n in [2, 3, 5] {
        for algorithm in Algorithm::ALL {
            let sums = in_time(move || {
                let threads: Vec<_> = (0..n)
                    .zip(group(n))
                    .map(|(rank, ends)| std::thread::spawn(move || all_reduces(rank, n, algorithm, ends)))
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            });
            let once = n * (n + 1) / 2;
            let right = |(i, sum): (usize, &u32)| *sum as usize == once * n * i;
            assert!(sums.iter().all(|sums| sums.iter().enumerate().all(right)), "{n} ranks, {algorithm}");
        }
    }
}
