//! The rendezvous over real connections: who gets in, who is kept out, and what everybody hears.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use ryzanstein_config::{
    BackendChoice, Config, EncryptionChoice, HostPort, RendezvousConfig, SecurityConfig, Timeout,
};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::rendezvous::{Client, Environment, Identity, Server, connect, listen};
use ryzanstein_orchestrator::status::wire::Report;
use ryzanstein_process_group::security::Security;
use ryzanstein_process_group::{
    BackendKind, Candidate, Capability, Cpus, Epoch, Error, GroupActivity, Membership, Rank, ReduceOp,
    Rendezvous, Secret, store,
};

fn within(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

fn security() -> Security {
    with_encryption(EncryptionChoice::Auto)
}

fn with_encryption(encryption: EncryptionChoice) -> Security {
    Security::new(&SecurityConfig { encryption }).expect("settings")
}

struct Job {
    server: Server,
    secret: Secret,
    security: Security,
    world_size: u32,
}

impl Job {
    fn new(world_size: u32) -> Self {
        Self::configured(world_size, &RendezvousConfig::default())
    }

    fn encrypted(world_size: u32, encryption: EncryptionChoice) -> Self {
        Self::with(world_size, &RendezvousConfig::default(), with_encryption(encryption))
    }

    fn configured(world_size: u32, config: &RendezvousConfig) -> Self {
        Self::with(world_size, config, security())
    }

    fn with(world_size: u32, config: &RendezvousConfig, security: Security) -> Self {
        let secret = Secret::random();
        let listener = listen::bind((Ipv4Addr::LOCALHOST, 0).into()).expect("a free port");
        let server = Server::start(listener, secret.clone(), security.clone(), world_size, Epoch(1), config)
            .expect("a server");
        Self { server, secret, security, world_size }
    }

    fn address(&self) -> HostPort {
        let address: SocketAddr = self.server.address();
        HostPort::new(address.ip().to_string(), address.port()).expect("an address")
    }

    fn client(&self, rank: u32) -> Client {
        Client::connect(
            self.address(),
            self.secret.clone(),
            self.security.clone(),
            self.identity(rank),
            within(20),
        )
        .expect("a connection")
    }

    fn identity(&self, rank: u32) -> Identity {
        Identity {
            rank: Some(Rank(rank)),
            local_rank: None,
            node_rank: None,
            world_size: self.world_size,
            epoch: Some(Epoch(1)),
        }
    }

    fn all(&self) -> Vec<(Client, Membership)> {
        let threads: Vec<_> = (0..self.world_size)
            .map(|rank| {
                let client = self.client(rank);
                std::thread::spawn(move || {
                    let membership = client.join(candidate(rank), within(20)).expect("joined");
                    (client, membership)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    }
}

fn candidate(pid: u32) -> Candidate {
    Candidate {
        host: "here".into(),
        pid,
        cpus: Cpus { count: 2, list: format!("{pid}-{}", pid + 1) },
        data_address: Some(([127, 0, 0, 1], 4000 + pid as u16).into()),
        wanted: BackendChoice::Auto,
        capabilities: vec![Capability::usable(BackendKind::Tcp)],
    }
}

#[test]
fn ranks_join_get_one_roster_and_share_a_store() {
    let job = Job::new(3);
    let ranks = job.all();
    for (i, (client, membership)) in ranks.iter().enumerate() {
        assert_eq!(membership.rank.index(), i);
        assert_eq!(membership.roster, ranks[0].1.roster);
        assert_eq!(membership.roster.members[2].cpus, Cpus { count: 2, list: "2-3".into() });
        assert_eq!(membership.roster.members[2].data_address, Some(([127, 0, 0, 1], 4002).into()));
        assert_eq!(membership.selection.backend, BackendKind::Tcp);
        assert!(client.local_address().expect("an address").is_loopback());
    }
    let waiting = {
        let store = ranks[0].1.store.clone();
        std::thread::spawn(move || store.get("key", within(20)))
    };
    ranks[1].1.store.set("key", b"value").expect("set");
    assert_eq!(waiting.join().expect("no panic").expect("a value"), b"value");
    assert_eq!(ranks[2].1.store.add("n", 2).expect("added"), 2);
    assert_eq!(ranks[0].1.store.add("n", 3).expect("added"), 5);

    let threads: Vec<_> = ranks
        .into_iter()
        .map(|(client, membership)| {
            std::thread::spawn(move || {
                let _connected = client;
                store::barrier(&*membership.store, "c", membership.rank, 3, within(20))
                    .expect("everybody came");
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("a rank");
    }
}

#[test]
fn a_rank_cannot_write_what_launchers_count_in() {
    let job = Job::new(1);
    let ranks = job.all();
    let rank = &ranks[0].1.store;
    let key = format!("{}launcher/1", store::RESERVED);
    for refused in [rank.set(&key, b"v"), rank.add(&key, 1).map(drop)] {
        let error = refused.expect_err("reserved");
        assert!(matches!(error, Error::Invalid(_)) && error.to_string().contains("reserved"), "{error}");
    }
    rank.set("launcher/1", b"v").expect("a key like any other");
}

#[test]
fn a_blocking_client_may_be_called_from_inside_a_runtime() {
    let job = Job::new(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = job.client(0);
        let membership = client.join(candidate(0), within(20)).expect("joined");
        membership.store.set("k", b"v").expect("set");
    });
}

#[test]
fn a_rank_that_never_arrives_is_named() {
    let job = Job::new(3);
    let (a, b) = (job.client(0), job.client(2));
    let other = std::thread::spawn(move || b.join(candidate(2), within(60)).err());
    let error =
        a.join(candidate(0), Instant::now() + Duration::from_millis(700)).err().expect("nobody else came");
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing.contains(&Rank(1))), "{error}");
    let error = other.join().expect("no panic").expect("the other hears the same");
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing.contains(&Rank(1))), "{error}");
}

#[test]
fn a_wrong_secret_is_refused_at_once_and_counted() {
    let job = Job::new(1);
    let error = Client::connect(job.address(), Secret::random(), security(), job.identity(0), within(20))
        .expect_err("refused");
    assert!(error.to_string().contains("does not know this job's secret"), "{error}");
    let deadline = within(20);
    while job.server.refused() == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(job.server.refused(), 1);
}

#[test]
fn encrypted_ranks_join_and_share_a_store_and_a_wrong_secret_is_refused() {
    let job = Job::encrypted(2, EncryptionChoice::On);
    let ranks = job.all();
    ranks[0].1.store.set("key", &vec![7; 200 << 10]).expect("set");
    assert_eq!(ranks[1].1.store.get("key", within(20)).expect("a value"), vec![7; 200 << 10]);
    let other =
        Client::connect(job.address(), Secret::random(), job.security.clone(), job.identity(0), within(20));
    let error = other.expect_err("refused").to_string();
    assert!(error.contains("does not know this job's secret"), "{error}");
}

#[test]
fn a_client_with_other_settings_is_told_at_once_what_each_end_has() {
    for (server, client) in
        [(EncryptionChoice::On, EncryptionChoice::Off), (EncryptionChoice::Off, EncryptionChoice::On)]
    {
        let job = Job::encrypted(1, server);
        let deadline = within(60);
        let client = with_encryption(client);
        let refused = Client::connect(job.address(), job.secret.clone(), client, job.identity(0), deadline);
        let error = refused.expect_err("refused").to_string();
        let words = ["this end", "the other end", "does not encrypt", "encrypts"];
        assert!(words.iter().all(|words| error.contains(words)), "{error}");
        assert!(Instant::now() < deadline, "it was not tried again and again");
        while job.server.refused() == 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(job.server.refused(), 1);
    }
}

#[test]
fn a_rank_that_finds_the_secret_in_a_file_is_told_at_once_of_other_settings() {
    let job = Job::encrypted(2, EncryptionChoice::On);
    let folder = tempfile::tempdir().expect("a folder");
    let port = job.server.address().port();
    let user = rustix::process::geteuid().as_raw();
    let file = folder.path().join(format!("ryzanstein-{user}-{port}-x.secret"));
    std::fs::write(&file, job.secret.expose()).expect("written");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("made private");
    let mut config = Config::default();
    config.security.encryption = EncryptionChoice::Off;
    config.rendezvous.timeout = Timeout::from_secs(60);
    let environment = [
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
        ("RANK", "1".to_owned()),
        ("WORLD_SIZE", "2".to_owned()),
        ("XDG_RUNTIME_DIR", folder.path().display().to_string()),
    ];
    let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    // Of half the time that it may take.
    let deadline = within(30);
    let error = connect(&config, &environment).expect_err("refused").to_string();
    assert!(error.contains("this end does not encrypt"), "{error}");
    assert!(Instant::now() < deadline, "it was not tried again and again");
}

#[test]
fn ranks_finalize_and_initialize_again() {
    const RANKS: usize = 3;
    let folder = tempfile::tempdir().expect("a folder");
    let free = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = free.local_addr().expect("bound").port();
    drop(free);
    let secrets = || {
        let entries = std::fs::read_dir(folder.path()).expect("a folder");
        entries.filter(|entry| {
            entry.as_ref().is_ok_and(|entry| entry.path().extension() == Some("secret".as_ref()))
        })
    };
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let environment: Environment = [
                ("MASTER_ADDR", "127.0.0.1".to_owned()),
                ("MASTER_PORT", port.to_string()),
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", RANKS.to_string()),
                ("XDG_RUNTIME_DIR", folder.path().display().to_string()),
            ]
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
            let secrets = &secrets;
            scope.spawn(move || {
                for round in 1..=3 {
                    let builder = Orchestrator::builder().environment(environment.clone());
                    let mut orchestrator =
                        builder.set("process_group.backend", "tcp").initialize().expect("initialized");
                    let world = orchestrator.manager().world();
                    assert_eq!(world.rank().index(), rank, "in round {round}");
                    let mut x = [1.0f32; 100];
                    world.all_reduce(&mut x, ReduceOp::Sum).expect("reduced");
                    assert!(x.iter().all(|x| *x == RANKS as f32), "in round {round}");
                    assert_eq!(secrets().count(), 0, "all have joined in round {round}");
                    orchestrator.finalize().expect("finalized");
                }
            });
        }
    });
}

#[test]
fn a_recorded_handshake_opens_no_second_connection() {
    for encryption in [EncryptionChoice::Off, EncryptionChoice::On] {
        let job = Job::encrypted(1, encryption);
        let middle = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let at = HostPort::new("127.0.0.1", middle.local_addr().expect("bound").port()).expect("an address");
        let server = job.server.address();
        // Passes one connection on, and keeps what the client says.
        let recorder = std::thread::spawn(move || {
            let (mut client, _) = middle.accept().expect("a client");
            let mut server = TcpStream::connect(server).expect("connected");
            let (mut back, mut forth) =
                (server.try_clone().expect("a clone"), client.try_clone().expect("a clone"));
            std::thread::spawn(move || std::io::copy(&mut back, &mut forth));
            let (mut said, mut bytes) = (Vec::new(), [0; 4096]);
            while let Ok(n @ 1..) = client.read(&mut bytes) {
                said.extend_from_slice(&bytes[..n]);
                server.write_all(&bytes[..n]).expect("passed on");
            }
            said
        });
        let client =
            Client::connect(at, job.secret.clone(), job.security.clone(), job.identity(0), within(20));
        drop(client.expect("a connection"));
        let said = recorder.join().expect("recorded");
        assert!(said.len() > 100, "{} bytes", said.len());
        let mut replay = TcpStream::connect(server).expect("connected");
        let _ = replay.write_all(&said);
        replay.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        let mut heard = Vec::new();
        let _ = replay.read_to_end(&mut heard);
        assert!(heard.len() <= 72, "nothing behind the server's own proof");
        let deadline = within(20);
        while job.server.refused() == 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(job.server.refused(), 1);
    }
}

#[test]
fn garbage_is_refused_and_counted_and_does_not_disturb_a_join() {
    let job = Job::new(1);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &[0xff; 4096], b"x"]
    {
        let mut stream = TcpStream::connect(job.server.address()).expect("connected");
        let _ = stream.write_all(garbage);
    }
    let ranks = job.all();
    assert_eq!(ranks.len(), 1);
    let deadline = within(20);
    while job.server.refused() < 4 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(job.server.refused(), 4);
}

#[test]
fn more_half_open_connections_than_are_allowed_make_way_for_a_rank() {
    let config = RendezvousConfig {
        max_connections: std::num::NonZeroU32::new(20).expect("not zero"),
        handshake_timeout: Timeout::from_secs(60),
        ..RendezvousConfig::default()
    };
    let job = Job::configured(2, &config);
    let silent: Vec<TcpStream> =
        (0..100).map(|_| TcpStream::connect(job.server.address()).expect("connected")).collect();
    assert_eq!(job.all().len(), 2);
    drop(silent);
}

#[test]
fn outsiders_do_not_evict_a_rank_that_has_proved_itself_and_still_encrypts() {
    let config = RendezvousConfig {
        max_connections: std::num::NonZeroU32::new(1).expect("not zero"),
        handshake_timeout: Timeout::from_secs(60),
        ..RendezvousConfig::default()
    };
    let job = Job::with(1, &config, with_encryption(EncryptionChoice::On));
    let middle = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let at = HostPort::new("127.0.0.1", middle.local_addr().expect("bound").port()).expect("an address");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut client, _) = middle.accept().expect("a client");
            let mut server = TcpStream::connect(job.server.address()).expect("connected");
            let (mut hear, mut forth) =
                (client.try_clone().expect("a clone"), server.try_clone().expect("a clone"));
            std::thread::spawn(move || std::io::copy(&mut hear, &mut forth));
            // The first byte of TLS comes only after the client's proof.
            let mut bytes = [0; 73];
            server.read_exact(&mut bytes[..72]).expect("the server's proof");
            client.write_all(&bytes[..72]).expect("passed on");
            server.read_exact(&mut bytes[72..]).expect("TLS begins");
            let silent = [(); 2].map(|()| TcpStream::connect(job.server.address()).expect("connected"));
            let deadline = within(20);
            while job.server.refused() == 0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(job.server.refused(), 1, "the second outsider evicts the first");
            client.write_all(&bytes[72..]).expect("passed on");
            let _ = std::io::copy(&mut server, &mut client);
            drop(silent);
        });
        let client =
            Client::connect(at, job.secret.clone(), job.security.clone(), job.identity(0), within(20));
        drop(client.expect("a connection"));
    });
}

#[test]
fn a_message_that_is_too_long_is_refused_and_the_connection_lives() {
    let max_message = "16KiB".parse().expect("the smallest maximum");
    let config = RendezvousConfig { max_message, ..RendezvousConfig::default() };
    let job = Job::configured(1, &config);
    let ranks = job.all();
    let store = &ranks[0].1.store;
    store.set("large", &vec![0; 100 << 10]).expect_err("too long");
    store.set("small", b"fits").expect("still connected");
}

#[test]
fn a_lost_rendezvous_is_an_error_that_says_so() {
    let mut job = Job::new(1);
    let ranks = job.all();
    let store = ranks[0].1.store.clone();
    let waiting = std::thread::spawn(move || store.get("never", within(60)));
    std::thread::sleep(Duration::from_millis(200));
    job.server = Job::new(1).server;
    let error = waiting.join().expect("no panic").expect_err("lost");
    assert!(error.to_string().contains("lost the rendezvous at 127.0.0.1"), "{error}");
}

#[test]
fn nobody_listening_is_an_error_that_says_where_and_what_to_look_at() {
    // Held and not listening, so that no other test gets the port.
    let held = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    held.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a free port");
    let free = held.local_addr().expect("bound").as_socket().expect("an address");
    let job = Job::new(1);
    let there = HostPort::new("127.0.0.1", free.port()).expect("an address");
    let soon = Instant::now() + Duration::from_millis(300);
    let error = Client::connect(there, job.secret.clone(), security(), job.identity(0), soon)
        .expect_err("nobody there");
    let words = error.to_string();
    assert!(words.contains(&format!("127.0.0.1:{}", free.port())) && words.contains("refused"), "{words}");
}

/// A server that reads the opening of this many connections and closes them, then passes one on to `server`. Returns its address.
fn closes_first(closed: usize, server: SocketAddr) -> HostPort {
    let middle = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = middle.local_addr().expect("bound").port();
    std::thread::spawn(move || {
        for _ in 0..closed {
            let (mut client, _) = middle.accept().expect("a client");
            client.read_exact(&mut [0; 40]).expect("an opening");
        }
        let (client, _) = middle.accept().expect("a client");
        let server = TcpStream::connect(server).expect("connected");
        let streams = || (client.try_clone().expect("a clone"), server.try_clone().expect("a clone"));
        let (mut forth, mut back) = (streams(), streams());
        std::thread::spawn(move || std::io::copy(&mut back.1, &mut back.0));
        let _ = std::io::copy(&mut forth.0, &mut forth.1);
    });
    HostPort::new("127.0.0.1", port).expect("an address")
}

#[test]
fn a_rank_whose_connections_are_closed_for_those_of_strangers_tries_again() {
    let job = Job::new(1);
    let there = closes_first(3, job.server.address());
    let client = Client::connect(there, job.secret.clone(), security(), job.identity(0), within(60));
    assert!(client.is_ok(), "{:?}", client.err());
}

#[test]
fn a_server_that_closes_every_connection_is_another_service() {
    let job = Job::new(1);
    let there = closes_first(1000, job.server.address());
    let error = Client::connect(there, job.secret.clone(), security(), job.identity(0), within(300))
        .expect_err("no rendezvous");
    assert!(error.to_string().contains("is not a rendezvous of this version"), "{error}");
    assert!(!error.to_string().contains("tried for"), "told before the deadline: {error}");
}

#[test]
fn a_failure_and_a_new_epoch_reach_those_who_wait() {
    let job = Job::new(2);
    let ranks = job.all();
    let store = ranks[0].1.store.clone();
    let waiting = std::thread::spawn(move || store.get("never", within(60)));
    std::thread::sleep(Duration::from_millis(100));
    ranks[1].0.report("the cable is gone".into(), Some("all_reduce".into()), None).expect("reported");
    job.server.fail("rank 1 (host here, pid 1) was killed by signal 9");
    let error = waiting.join().expect("no panic").expect_err("failed");
    assert!(error.to_string().contains("killed by signal 9"), "{error}");
    let report = job.server.report(Rank(1)).expect("kept");
    assert!(report.cause.contains("the cable is gone"));
    assert_eq!(report.last_call.as_deref(), Some("all_reduce"));

    job.server.advance(Epoch(2));
    let error = ranks[0].1.store.set("k", b"v").expect_err("fenced");
    assert!(error.to_string().contains("belongs to epoch 1"), "{error}");
    assert_eq!(job.server.refused(), 1, "counted");
    ranks[0].0.beat(&Report::default()).expect_err("fenced");
    assert_eq!(job.server.refused(), 2, "a heartbeat too");
}

#[test]
fn the_last_heartbeat_of_each_rank_is_kept_if_it_is_in_the_epoch_and_not_too_long() {
    let job = Job::new(2);
    let refused = |outcome: Result<(), Error>| outcome.expect_err("refused").to_string();
    assert!(refused(job.client(0).beat(&Report::default())).contains("join"));
    let ranks = job.all();
    let client = &ranks[1].0;
    let report = |resident_bytes| Report { resident_bytes: Some(resident_bytes), ..Report::default() };
    client.beat(&report(1)).expect("kept");
    client.beat(&report(2)).expect("kept");
    let endless = GroupActivity { name: "x".repeat(65 << 10), ..GroupActivity::default() };
    let why = refused(client.beat(&Report { groups: vec![endless], ..Report::default() }));
    assert!(why.contains("at most 65536 are kept"), "{why}");
    let beats = job.server.beats();
    assert_eq!(beats.keys().copied().collect::<Vec<_>>(), [Rank(1)]);
    assert_eq!(*beats[&Rank(1)].report, report(2));
    job.server.advance(Epoch(2));
    assert!(job.server.beats().is_empty());
    assert!(refused(client.beat(&report(3))).contains("rank 1 in epoch 1"));
    assert!(job.server.beats().is_empty());
}
