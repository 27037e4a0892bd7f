//! One rank of the backend against peers that the test simulates, byte by byte.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use ryzanstein_config::SecurityConfig;

use std::time::{Duration, Instant};

use super::shared::tests::pair;
use super::*;
use crate::device::buffer::{View, ViewMut};
use crate::link::mesh::{self, Bound, Mesh, Peer};
use crate::link::security::{Channel, Security};
use crate::link::wire::frame::HEADER;
use crate::membership::roster::Secret;
use crate::testing::{LATE, in_time, member};
use crate::types::operation::ReduceOp;
use crate::types::rank::Epoch;

/// Returns one rank of a group on one host whose links are these streams.
fn group(rank: usize, n: usize, settings: Settings, streams: Vec<TcpStream>) -> CpuGroup {
    on_hosts(rank, &vec!["here"; n], settings, streams)
}

/// Returns one rank of a group with a rank on each of these hosts.
fn on_hosts(rank: usize, hosts: &[&str], settings: Settings, mut streams: Vec<TcpStream>) -> CpuGroup {
    let members = Rank::all(hosts.len()).zip(hosts);
    let members: Vec<Member> =
        members.map(|(rank, host)| Member { host: (*host).into(), ..member(rank) }).collect();
    let connections = Peers::from_fn(rank, hosts.len(), |_| {
        let stream = streams.remove(0);
        Channel::clear(stream).unwrap()
    });
    let members: Vec<&Member> = members.iter().collect();
    CpuGroup::new("tested", Rank(rank as u32), &members, connections, settings)
}

fn settings(spin: Duration) -> Settings {
    Settings {
        demand: None,
        tuned: Vec::new(),
        spin: SpinPolicy { limit: spin, yields: true },
        shared_memory: false,
        liveness: None,
    }
}

/// Returns both ends of a connection.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    (TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap().0)
}

/// Returns rank 0 of `n`, with the other ends of its links to ranks 1, 2 and so on.
fn rank_0_of(n: usize, spin: Duration) -> (CpuGroup, Vec<TcpStream>) {
    let (mine, theirs) = (1..n).map(|_| connection()).unzip();
    (group(0, n, settings(spin), mine), theirs)
}

fn call(operation: Operation, sequence: u64, patience: Duration, output: Option<ViewMut<'_>>) -> Call<'_> {
    let count = output.as_ref().map_or(0, ViewMut::count);
    let fingerprint = CallFingerprint::new(operation, DType::U8, count);
    let deadline = Instant::now() + patience;
    Call {
        fingerprint,
        sequence,
        deadline,
        in_place: false,
        input: None,
        output,
        add_norm: None,
        interrupt: None,
    }
}

/// Returns the next frame's header, and skips its payload. Returns `None` at the end.
fn read_frame(peer: &mut TcpStream) -> Option<Header> {
    let mut bytes = [0; HEADER];
    peer.read_exact(&mut bytes).ok()?;
    let header = Header::decode(&bytes).expect("frames follow each other");
    peer.read_exact(&mut vec![0; header.length]).ok()?;
    Some(header)
}

/// Returns rank 0 of two whose links go through memory, with the other end of its link: the rings, and the socket.
fn rank_0_sharing(spin: Duration) -> (CpuGroup, shared::ByteQueues, TcpStream) {
    let (mut group, mut peers) = rank_0_of(2, spin);
    let [(mine, doorbell), (theirs, _)] = pair(false);
    group.go_through(vec![(Peer::new(1, 0).unwrap(), mine)], doorbell);
    (group, theirs, peers.pop().unwrap())
}

/// Returns the frame of a message from rank 1 to rank 0.
fn message(count: usize) -> Vec<u8> {
    let fingerprint = CallFingerprint::new(Operation::Send { to: Rank(0) }, DType::U8, count);
    let header = Header { fingerprint, sequence: 1, ..control(Kind::Data, Rank(1), count) };
    [&header.encode()[..], &vec![7; count]].concat()
}

#[test]
fn a_rank_that_ends_in_the_middle_of_a_ring_is_lost_and_what_it_sent_whole_is_not() {
    for (sent, is_whole) in [(20, false), (HEADER + 500, false), (HEADER + 1000, true)] {
        let (mut group, mut rings, socket) = rank_0_sharing(Duration::ZERO);
        assert_eq!(rings.send(&message(1000)[..sent], &[]).unwrap(), sent);
        drop((rings, socket));
        let outcome = in_time(move || {
            let mut got = [0u8; 1000];
            let receive = call(Operation::Recv { from: Rank(1) }, 1, LATE, Some(ViewMut::of(&mut got)));
            group.submit(receive).map(|_| got)
        });
        match outcome {
            Ok(got) => assert!(is_whole && got == [7; 1000]),
            Err(error) => assert!(!is_whole && matches!(error, Error::PeerLost { .. }), "{error}"),
        }
    }
}

#[test]
fn a_rank_that_ends_while_its_ring_is_full_is_lost() {
    let (mut group, rings, socket) = rank_0_sharing(Duration::ZERO);
    let waiting = std::thread::spawn(move || {
        let data = vec![1u8; 1 << 20];
        let mut send = call(Operation::Send { to: Rank(1) }, 1, LATE, None);
        (send.input, send.fingerprint.count) = (Some(View::of(&data)), data.len());
        group.submit(send).unwrap_err()
    });
    std::thread::sleep(Duration::from_millis(100));
    drop((rings, socket));
    let error = in_time(move || waiting.join().unwrap());
    assert!(matches!(error, Error::PeerLost { rank: Rank(1), .. }), "{error}");
}

#[test]
fn a_rank_that_ends_is_lost_to_one_that_never_sleeps() {
    let (mut group, rings, socket) = rank_0_sharing(Duration::from_secs(3600));
    drop((rings, socket));
    let error = in_time(move || group.submit(call(Operation::Barrier, 1, LATE, None)).unwrap_err());
    assert!(matches!(error, Error::PeerLost { rank: Rank(1), .. }), "{error}");
}

#[test]
fn a_rank_that_ends_is_lost_to_one_that_only_sends() {
    let (mut group, rings, socket) = rank_0_sharing(Duration::ZERO);
    drop((rings, socket));
    let error = in_time(move || {
        let data = [1u8; 100];
        let mut sends = (1..).map(|sequence| {
            // The total is smaller than the capacity of the ring.
            assert!(sequence < 200, "no send has failed");
            std::thread::sleep(Duration::from_millis(1));
            let mut send = call(Operation::Send { to: Rank(1) }, sequence, LATE, None);
            (send.input, send.fingerprint.count) = (Some(View::of(&data)), data.len());
            group.submit(send)
        });
        sends.find_map(Result::err).unwrap()
    });
    assert!(matches!(error, Error::PeerLost { rank: Rank(1), .. }), "{error}");
}

#[test]
fn a_rank_that_ends_behind_a_message_that_waits_is_lost_unless_it_said_goodbye() {
    let abort = [&control(Kind::Abort, Rank(1), 4).encode()[..], b"full"].concat();
    let goodbye = control(Kind::Goodbye, Rank(1), 0).encode();
    for (shares, last) in [false, true].into_iter().flat_map(|s| [(s, &[][..]), (s, &abort), (s, &goodbye)]) {
        let (mut group, mut peers) = rank_0_of(3, Duration::ZERO);
        let mut rings = shares.then(|| {
            let [(mine, doorbell), (theirs, _)] = pair(false);
            group.go_through(vec![(Peer::new(1, 0).unwrap(), mine)], doorbell);
            theirs
        });
        let mut output = [0u8; 3000];
        let waiting = std::thread::spawn(move || {
            let mut gather = call(Operation::AllGather, 1, LATE, Some(ViewMut::of(&mut output)));
            (gather.in_place, gather.fingerprint.count) = (true, 1000);
            group.submit(gather).map(|_| ())
        });
        // Rank 1 takes part, is ahead by a call, and ends. Rank 2 comes later.
        let theirs = read_frame(&mut peers[1]).expect("rank 0 sends to rank 2");
        let from = |rank, sequence| Header { rank: Rank(rank), sequence, ..theirs }.encode();
        let first = peers.remove(0);
        let payload = vec![1; theirs.length];
        let sent = [&from(1, 1)[..], &payload, &from(1, 2), &payload].concat();
        match &mut rings {
            Some(rings) => assert_eq!(rings.send(&sent, &[]).unwrap(), sent.len()),
            None => (&first).write_all(&sent).unwrap(),
        }
        std::thread::sleep(Duration::from_millis(50));
        (&first).write_all(last).unwrap();
        drop((rings, first));
        std::thread::sleep(Duration::from_millis(50));
        if last == goodbye {
            assert!(!waiting.is_finished(), "a rank may leave when it has done its part");
            peers[0].write_all(&[&from(2, 1)[..], &payload].concat()).unwrap();
        }
        match in_time(move || waiting.join().unwrap()) {
            Ok(()) => assert_eq!(last, goodbye),
            Err(Error::PeerLost { rank: Rank(1), .. }) => assert!(last.is_empty()),
            Err(Error::PeerAborted { reason, .. }) => assert!(last == abort && reason == "full"),
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn a_goodbye_waits_until_there_is_room_for_it() {
    let (mut group, mut peers) = rank_0_of(2, Duration::ZERO);
    let mut sent = 0;
    while let link::Moved::Bytes(bytes) = group.links[Peer::new(1, 0).unwrap()].send(&[0; 4096], &[]) {
        sent += bytes;
    }
    let leaving = std::thread::spawn(move || drop(group));
    std::thread::sleep(Duration::from_millis(20));
    let mut all = Vec::new();
    peers[0].read_to_end(&mut all).unwrap();
    leaving.join().unwrap();
    let last = all.last_chunk().and_then(Header::decode);
    assert!(
        all.len() == sent + HEADER && last.is_some_and(|header| header.kind == Kind::Goodbye),
        "{last:?}"
    );
}

#[test]
fn positions_that_cannot_be_are_a_lost_rank_and_not_a_panic() {
    let (mut group, rings, _socket) = rank_0_sharing(Duration::ZERO);
    rings.lie(u64::MAX);
    let error = in_time(move || group.submit(call(Operation::Barrier, 1, LATE, None)).unwrap_err());
    assert!(error.to_string().contains("out of range"), "{error}");
}

#[test]
fn an_abort_through_memory_is_heard_asleep() {
    let (mut group, mut rings, _socket) = rank_0_sharing(Duration::ZERO);
    let waiting =
        std::thread::spawn(move || group.submit(call(Operation::Barrier, 1, LATE, None)).unwrap_err());
    std::thread::sleep(Duration::from_millis(100));
    let reason = b"the disk is full";
    rings.send(&control(Kind::Abort, Rank(1), reason.len()).encode(), reason).unwrap();
    let error = in_time(move || waiting.join().unwrap());
    assert!(matches!(&error, Error::PeerAborted { reason, .. } if reason == "the disk is full"), "{error}");
}

#[test]
fn a_rank_on_rings_hears_what_a_peer_says_on_the_socket_before_it_leaves() {
    let (mut group, rings, mut socket) = rank_0_sharing(Duration::ZERO);
    let reason = b"the disk is full";
    socket.write_all(&control(Kind::Abort, Rank(1), reason.len()).encode()).unwrap();
    socket.write_all(reason).unwrap();
    drop((rings, socket));
    let error = in_time(move || group.submit(call(Operation::Barrier, 1, LATE, None)).unwrap_err());
    assert!(matches!(&error, Error::PeerAborted { reason, .. } if reason == "the disk is full"), "{error}");
}

#[test]
fn an_abort_that_came_before_the_rings_is_heard() {
    let (mut group, mut peers) = rank_0_of(2, Duration::ZERO);
    let reason = b"the disk is full";
    let abort = [&control(Kind::Abort, Rank(1), reason.len()).encode()[..], reason].concat();
    let (before, after) = abort.split_at(HEADER + 3);
    peers[0].write_all(before).unwrap();
    let link = &mut group.links[Peer::new(1, 0).unwrap()];
    let begun = Instant::now();
    while link.buffered().len() < before.len() && begun.elapsed() < LATE {
        link.fill(usize::MAX);
    }
    let [(mine, doorbell), theirs] = pair(false);
    group.go_through(vec![(Peer::new(1, 0).unwrap(), mine)], doorbell);
    peers[0].write_all(after).unwrap();
    drop((theirs, peers));
    let error = in_time(move || group.submit(call(Operation::Barrier, 1, LATE, None)).unwrap_err());
    assert!(matches!(&error, Error::PeerAborted { reason, .. } if reason == "the disk is full"), "{error}");
}

#[test]
fn a_rank_on_rings_tells_peers_that_are_still_on_sockets_that_it_leaves() {
    let (mut group, _rings, mut socket) = rank_0_sharing(Duration::ZERO);
    group.abort(&Error::invalid("the disk is full"));
    drop(group);
    socket.set_read_timeout(Some(LATE)).unwrap();
    let kinds: Vec<Kind> = std::iter::from_fn(|| read_frame(&mut socket)).map(|header| header.kind).collect();
    assert_eq!(kinds, [Kind::Abort, Kind::Goodbye]);
}

/// Makes a group in which each rank has a host and may share memory or not. Returns for each rank the number of links that go
/// through memory, and its paths.
fn negotiated(ranks: &[(&str, bool)]) -> Vec<(usize, String)> {
    let hosts: Vec<&str> = ranks.iter().map(|(host, _)| *host).collect();
    let mut streams: Vec<Vec<TcpStream>> = ranks.iter().map(|_| Vec::new()).collect();
    for higher in 1..ranks.len() {
        for lower in 0..higher {
            let (a, b) = connection();
            streams[lower].push(a);
            streams[higher].push(b);
        }
    }
    let ranks = streams.into_iter().zip(ranks).enumerate().map(|(rank, (streams, (_, shared_memory)))| {
        let settings = Settings { shared_memory: *shared_memory, ..settings(Duration::ZERO) };
        let mut group = on_hosts(rank, &hosts, settings, streams);
        std::thread::spawn(move || {
            group.negotiate(Instant::now() + LATE).unwrap();
            let shared = group.links.pairs().filter(|(_, link)| link.is_shared()).count();
            for sequence in 1..100 {
                group.submit(call(Operation::Barrier, sequence, LATE, None)).unwrap();
            }
            (shared, format!("{:?}", group.paths.describe()))
        })
    });
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().map(|rank| in_time(move || rank.join().unwrap())).collect()
}

#[test]
fn links_within_a_host_go_through_memory_only_if_all_its_ranks_can() {
    let check = |ranks: &[(&str, bool)], expected: &[usize], says: &str| {
        for ((shared, paths), expected) in negotiated(ranks).into_iter().zip(expected) {
            assert_eq!(shared, *expected, "{ranks:?}");
            assert!(paths.contains(says), "{says}: {paths}");
        }
    };
    check(&[("a", true), ("a", false), ("a", true)], &[0; 3], "process_group.tcp.shared_memory is false");
    check(&[("a", true); 3], &[2; 3], "SharedMemory(Direct)");
    check(&[("a", true), ("b", true), ("b", true), ("c", true)], &[0, 1, 1, 0], "only links within a host");
    check(&[("a", true), ("b", true)], &[0; 2], "each rank has a host of its own");
    let one_refuses = [("a", true), ("b", true), ("a", true), ("b", false), ("a", true), ("c", true)];
    check(&one_refuses, &[2, 0, 2, 0, 2, 0], "those of one host do not share memory");
}

#[test]
fn a_rank_that_ends_is_lost_to_one_that_waits_for_memory_and_sockets() {
    for lost in [1, 2] {
        let [(mine, theirs), (mine_2, theirs_2)] = [connection(), connection()];
        let mut group = on_hosts(0, &["a", "a", "b"], settings(Duration::ZERO), vec![mine, mine_2]);
        let [(to_peer, doorbell), (of_peer, _bell)] = pair(true);
        group.go_through(vec![(Peer::new(1, 0).unwrap(), to_peer)], doorbell);
        let waiting =
            std::thread::spawn(move || group.submit(call(Operation::Barrier, 1, LATE, None)).unwrap_err());
        std::thread::sleep(Duration::from_millis(100));
        let _stays = if lost == 1 {
            drop((theirs, of_peer));
            theirs_2
        } else {
            drop(theirs_2);
            theirs
        };
        let error = in_time(move || waiting.join().unwrap());
        assert!(matches!(error, Error::PeerLost { rank, .. } if rank == Rank(lost)), "{error}");
    }
}

#[test]
fn an_abort_that_comes_in_two_pieces_is_heard_when_its_end_is_there() {
    let (mut group, mut peers) = rank_0_of(2, Duration::ZERO);
    let reason = b"the disk is full";
    peers[0].write_all(&control(Kind::Abort, Rank(1), reason.len()).encode()).unwrap();
    let waiting = std::thread::spawn(move || {
        let mut got = [0u8];
        let output = Some(ViewMut::of(&mut got));
        group.submit(call(Operation::Recv { from: Rank(1) }, 1, LATE, output)).unwrap_err()
    });
    std::thread::sleep(Duration::from_millis(300));
    let started = Instant::now();
    peers[0].write_all(reason).unwrap();
    let error = waiting.join().unwrap();
    assert!(matches!(&error, Error::PeerAborted { reason, .. } if reason == "the disk is full"), "{error}");
    assert!(started.elapsed() < LATE / 2, "heard when it came, not at the deadline");
}

#[test]
fn looking_without_sleep_ends_at_the_deadline() {
    let (mut group, _peers) = rank_0_of(2, Duration::from_secs(3600));
    let error = in_time(move || {
        group.submit(call(Operation::Barrier, 1, Duration::from_millis(300), None)).unwrap_err()
    });
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(1)]), "{error}");
}

#[test]
fn a_rank_that_fails_while_the_group_is_made_says_why_before_it_leaves() {
    let (mut group, mut peers) = rank_0_of(3, Duration::ZERO);
    let mut other = peers.pop().unwrap();
    drop(peers);
    let error = group.negotiate(Instant::now() + LATE).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: Rank(1), .. }), "{error}");
    drop(group);
    other.set_read_timeout(Some(LATE)).unwrap();
    let kinds = std::iter::from_fn(|| read_frame(&mut other)).map(|header| header.kind);
    let kinds: Vec<Kind> = kinds.filter(|kind| *kind != Kind::Data).collect();
    assert_eq!(kinds.first(), Some(&Kind::Abort), "{kinds:?}");
}

#[test]
fn a_rank_that_does_not_make_the_group_is_named() {
    let (mut group, mut peers) = rank_0_of(3, Duration::ZERO);
    // One rank has entered the call, sent its messages, and waits too.
    let (operation, count) = (Operation::Send { to: Rank(0) }, size_of::<shared::SegmentHandle>());
    let fingerprint = CallFingerprint::new(operation, DType::U8, count);
    let told = Header { fingerprint, ..control(Kind::Data, Rank(1), count) };
    peers[0].write_all(&[&told.encode()[..], &vec![0; count]].concat()).unwrap();
    let error = group.negotiate(Instant::now() + Duration::from_millis(300)).unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(2)]), "{error}");
}

#[test]
fn a_silent_process_is_blamed_only_if_it_explains_who_is_missing() {
    let bound = Bound::new(Ipv4Addr::LOCALHOST.into()).unwrap();
    let security = Security::new(&SecurityConfig::default()).unwrap();
    let settings = mesh::Settings { handshake: LATE, security };
    let mesh = Mesh::start(bound, Epoch(1), Rank(0), Secret::new([7; 32]), &settings).unwrap();
    // The kernel accepts connections for a stopped process.
    let stopped = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = Header {
        fingerprint: CallFingerprint::new(Operation::Barrier, DType::U8, 0),
        sequence: 1,
        ..control(Kind::Query, Rank(1), 0)
    };
    let outcome = |has_come: bool| {
        let (mut group, mut peers) = rank_0_of(3, Duration::ZERO);
        group.settings.liveness = Some(mesh.liveness());
        group.links[Peer::new(1, 0).unwrap()].peer.data_address = stopped.local_addr().ok();
        if has_come {
            peers[0].write_all(&there.encode()).unwrap();
        }
        group.submit(call(Operation::Barrier, 1, Duration::from_secs(6), None)).unwrap_err()
    };
    let outcome = &outcome;
    let [stopped, passed] = std::thread::scope(|scope| {
        [false, true].map(|has_come| scope.spawn(move || outcome(has_come))).map(|it| it.join().unwrap())
    });
    assert!(matches!(&stopped, Error::PeerUnresponsive { rank: Rank(1), .. }), "{stopped}");
    assert!(matches!(&passed, Error::Timeout { missing, .. } if *missing == [Rank(2)]), "{passed}");
}

#[test]
fn what_can_no_longer_be_said_to_a_peer_is_not_kept() {
    let (mut group, peers) = rank_0_of(2, Duration::ZERO);
    drop(peers);
    let link = &mut group.links[Peer::new(1, 0).unwrap()];
    let begun = Instant::now();
    // The first bytes may still fit the socket.
    while link.closed.is_none() && begun.elapsed() < LATE {
        link.queue_control(&control(Kind::Query, Rank(0), 0), &[]);
        link.flush_control();
    }
    assert!(link.closed.is_some() && !link.has_control());
}

#[test]
fn a_forced_path_is_taken_by_calls_made_before_too() {
    let (mut group, _peers) = rank_0_of(4, Duration::ZERO);
    let call = CallFingerprint::new(Operation::AllReduce(ReduceOp::Sum), DType::F32, 1000);
    let path = |group: &mut CpuGroup| group.program(call, true).unwrap().0;
    let chosen = path(&mut group);
    for algorithm in [Algorithm::Ring, Algorithm::HalvingDoubling] {
        group.force(Some(Path::Tcp(algorithm))).unwrap();
        assert_eq!(path(&mut group), Path::Tcp(algorithm));
    }
    group.force(None).unwrap();
    assert_eq!(path(&mut group), chosen);
}

#[test]
fn the_time_until_a_late_rank_comes_is_told_as_waiting() {
    let (mut group, mut peers) = rank_0_of(2, Duration::ZERO);
    let late = Duration::from_millis(60);
    let peer = std::thread::spawn(move || {
        std::thread::sleep(late);
        // A barrier of two ranks is one message each way.
        let fingerprint = CallFingerprint::new(Operation::Barrier, DType::U8, 0);
        let algorithm = Algorithm::RecursiveDoubling;
        let mine = Header { fingerprint, algorithm, sequence: 1, ..control(Kind::Data, Rank(1), 1) };
        peers[0].write_all(&mine.encode()).unwrap();
        peers[0].write_all(&[0]).unwrap();
        read_frame(&mut peers[0]);
        peers
    });
    let completion = in_time(move || {
        let done = group.submit(call(Operation::Barrier, 1, LATE, None)).unwrap();
        (done, group)
    });
    assert!(completion.0.waited >= late / 2, "{:?}", completion.0.waited);
    drop(peer.join().unwrap());
}
