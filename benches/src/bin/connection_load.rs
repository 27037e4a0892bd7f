//! The load of connections: a large job, and clients that do not know the job's secret.
//!
//! `connection_load joins [RANKS]`: RANKS simulated ranks join one rendezvous, each over its own connection.
//! `connection_load idle [CONNECTIONS]`: clients connect to a rank's data port, send nothing, and reconnect when they are evicted,
//! while the rank, which may open 1024 files, makes 50 groups and opens files of its own. Then the same at the rank's metrics port.
//! `connection_load garbage [MEGABYTES]`: clients write random bytes to a rendezvous, then to a rank's data port, while the
//! memory of the process is observed; afterwards a rank joins, and a group is made.
//! `connection_load refusals [TRIES]`: time until a connection with a wrong proof, without a proof, or with a recorded
//! handshake is closed, at a rendezvous and at a rank's data port.
//!
//! Each prints its results as JSON. Servers run in separate processes, so that their memory and files are measured alone.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hyper_util::rt::TokioIo;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use ryzanstein_config::{BackendChoice, HostPort, MetricsConfig, RendezvousConfig, SecurityConfig};
use ryzanstein_orchestrator::control::JoinRequest;
use ryzanstein_orchestrator::control::control_client::ControlClient;
use ryzanstein_orchestrator::rendezvous::{Client, Identity, Server, handshake, listen};
use ryzanstein_orchestrator::telemetry::{self, Origin};
use ryzanstein_orchestrator::{Orchestrator, VERSION};
use ryzanstein_process_group::security::{Protection, Security};
use ryzanstein_process_group::{
    BackendKind, Candidate, Capability, Cpus, Epoch, MemoryRendezvous, Rank, Rendezvous as _, Secret,
};
use serde_json::json;
use tonic::transport::Endpoint;

/// Upper bound of every wait.
const PATIENCE: Duration = Duration::from_secs(120);
const SECRET: [u8; 32] = [7; 32];
/// Number of groups made while idle clients connect.
const GROUPS: usize = 50;
/// Limit on open files of the rank that idle clients connect to.
const FILES: u64 = 1024;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<usize>().with_context(|| format!("`{text}` is no number"));
    match arguments[..] {
        ["joins"] => joins(10_000),
        ["joins", ranks] => joins(number(ranks)?),
        ["idle"] => idle(10_000),
        ["idle", connections] => idle(number(connections)?),
        ["garbage"] => garbage(1024),
        ["garbage", megabytes] => garbage(number(megabytes)?),
        ["refusals"] => refusals(200),
        ["refusals", tries] => refusals(number(tries)?),
        ["serve", ranks] => serve(number(ranks)?),
        ["rank", groups] => rank(number(groups)?),
        _ => bail!("unknown arguments; see the top of this file"),
    }
}

/// Returns the security settings of a job on one host.
fn security() -> Result<Security> {
    Ok(Security::new(&SecurityConfig::default())?)
}

// ---- separate processes -------------------------------------------------------------------------------------------------

/// A process of this program. It prints the address where it listens, and then does one thing for each line of input.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    addresses: Vec<SocketAddr>,
}

impl Other {
    fn start(arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take().context("piped")?, child.stdout.take().context("piped")?);
        let mut other = Self { child, input, output: BufReader::new(output), addresses: Vec::new() };
        let addresses = other.line()?;
        other.addresses = addresses.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        Ok(other)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "the other process has ended");
        Ok(line.trim().to_owned())
    }

    /// Lets the process continue, and returns its next output.
    fn go(&mut self) -> Result<String> {
        writeln!(self.input, "go")?;
        self.line()
    }

    /// Returns the value in kibibytes of one line of `/proc/PID/status`.
    fn memory(&self, what: &str) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(what)).context("no such line")?;
        Ok(line.trim_start_matches(':').trim().trim_end_matches(" kB").parse()?)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_for_word() -> Result<()> {
    let mut line = String::new();
    ensure!(std::io::stdin().read_line(&mut line)? > 0, "the benchmark has ended");
    Ok(())
}

fn open_many_files() -> Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// Serves a rendezvous that expects `ranks` ranks.
fn serve(ranks: usize) -> Result<()> {
    open_many_files()?;
    let listener = listen::bind((Ipv4Addr::LOCALHOST, 0).into())?;
    let secret = Secret::new(SECRET);
    let server = Server::start(
        listener,
        secret,
        security()?,
        u32::try_from(ranks)?,
        Epoch(1),
        &RendezvousConfig::default(),
    )?;
    println!("{}", server.address());
    loop {
        wait_for_word()?;
        println!("{} connections, {} refused", server.connections(), server.refused());
    }
}

// ---- joins --------------------------------------------------------------------------------------------------------------

fn joins(ranks: usize) -> Result<()> {
    open_many_files()?;
    let server = Other::start(&["serve", &ranks.to_string()])?;
    let (before, address) = (server.memory("VmRSS")?, server.addresses[0]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let started = Instant::now();
    let bytes = runtime.block_on(async {
        let joining: Vec<_> =
            (0..ranks).map(|rank| tokio::spawn(join(address, rank as u32, ranks as u32))).collect();
        let mut bytes = 0;
        for rank in joining {
            bytes += rank.await??;
        }
        anyhow::Ok(bytes)
    })?;
    let report = json!({
        "ranks": ranks,
        "seconds": started.elapsed().as_secs_f64(),
        "server_peak_mb": (server.memory("VmHWM")? as f64 / 1024.0).round(),
        "server_before_mb": (before as f64 / 1024.0).round(),
        "requests": ranks,
        "bytes_of_rosters": bytes,
    });
    println!("{report}");
    Ok(())
}

/// Joins as one simulated rank: a connection, the handshake, and one request. Returns the size of the received roster in bytes.
async fn join(address: SocketAddr, rank: u32, ranks: u32) -> Result<usize> {
    let security = security()?;
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let security = security.clone();
        async move {
            let stream = tokio::net::TcpStream::connect(address).await?;
            let secret = Secret::new(SECRET);
            let secured = handshake::connect(stream, &secret, &security, Protection::Clear).await;
            Ok::<_, std::io::Error>(TokioIo::new(secured.map_err(std::io::Error::other)?))
        }
    });
    let channel = Endpoint::from_static("http://rendezvous").connect_with_connector(connector).await?;
    let mut client = ControlClient::new(channel).max_decoding_message_size(16 << 20);
    let request = JoinRequest {
        epoch: 1,
        world_size: ranks,
        rank: Some(rank),
        version: VERSION.into(),
        host: format!("node{}", rank / 8),
        pid: 1000 + rank,
        data_address: Some(format!("10.0.{}.{}:40000", rank / 2048, rank / 8 % 256)),
        wanted: "tcp".into(),
        capabilities: vec![ryzanstein_orchestrator::control::Capability {
            backend: "tcp".into(),
            ..Default::default()
        }],
        timeout_ms: 60_000,
        cpus: 1,
        ..JoinRequest::default()
    };
    let reply = client.join(request).await?.into_inner();
    ensure!(reply.refusal.is_none(), "{:?}", reply.refusal);
    ensure!(reply.rank == rank, "rank {rank} became {}", reply.rank);
    Ok(reply.roster.len())
}

// ---- idle clients -------------------------------------------------------------------------------------------------------

/// A thread that keeps `count` silent connections to an address, and reopens each connection that is closed.
struct Crowd {
    is_over: Arc<AtomicBool>,
    opened: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<()>,
}

impl Crowd {
    fn start(address: SocketAddr, connections: usize) -> Self {
        let (is_over, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (over, count) = (Arc::clone(&is_over), Arc::clone(&opened));
        let thread = std::thread::spawn(move || {
            let mut crowd: Vec<TcpStream> = Vec::new();
            while !over.load(Ordering::Relaxed) {
                if crowd.len() >= connections {
                    // Evicted clients reconnect at the pace of the loop.
                    crowd.retain(is_open);
                    std::thread::sleep(Duration::from_millis(1));
                } else if let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
                    let _ = stream.set_nonblocking(true);
                    crowd.push(stream);
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self { is_over, opened, thread }
    }

    fn wait_for(&self, connections: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.opened.load(Ordering::Relaxed) < connections as u64 {
            ensure!(Instant::now() < deadline, "the idle clients could not connect");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Stops the thread, and returns the number of connections made.
    fn end(self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.thread.join();
        self.opened.load(Ordering::Relaxed)
    }
}

fn is_open(mut stream: &TcpStream) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(read) => read > 0,
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    }
}

/// Runs two ranks as threads, with the usual limit on open files of a shell. Prints the addresses of their data port and of
/// their metrics. Then, for each line of input, makes groups and opens files, and prints the time of the groups.
fn rank(groups: usize) -> Result<()> {
    setrlimit(Resource::Nofile, Rlimit { current: Some(FILES), maximum: Some(FILES) })?;
    let [first, second] = MemoryRendezvous::new(2).try_into().ok().context("two ranks")?;
    let (word, heard) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || -> Result<()> {
        let mut rank = initialize(second)?;
        while heard.recv().is_ok() {
            make_groups(&mut rank, groups, false)?;
        }
        Ok(())
    });
    let mut rank = initialize(first)?;
    let metrics = MetricsConfig { address: Some((Ipv4Addr::LOCALHOST, 0).into()), ..Default::default() };
    let served = telemetry::serve_metrics(&metrics, &Origin { rank: Some(0), ..Origin::default() }, 0)?;
    let data = rank.manager().roster().members[0].data_address.context("a data port")?;
    println!("{data}{}", served.map_or_else(String::new, |address| format!(" {address}")));
    loop {
        wait_for_word()?;
        word.send(())?;
        let mut took = make_groups(&mut rank, groups, true)?;
        took.sort_by(f64::total_cmp);
        let at = |share: f64| took.get(((took.len() - 1) as f64 * share).round() as usize).copied();
        println!("{}", json!({ "groups": took.len(), "p50_ms": at(0.5), "p99_ms": at(0.99) }));
    }
}

fn initialize(rendezvous: MemoryRendezvous) -> Result<Orchestrator> {
    let builder = Orchestrator::builder().set("process_group.backend", "tcp");
    Ok(builder.rendezvous(rendezvous).initialize()?)
}

/// Returns the milliseconds that each group took. The application opens files meanwhile, which must not fail.
fn make_groups(rank: &mut Orchestrator, groups: usize, opens_files: bool) -> Result<Vec<f64>> {
    let mut took = Vec::new();
    for _ in 0..groups {
        let started = Instant::now();
        let group = rank.manager().new_group(&[Rank(0), Rank(1)])?;
        took.push(started.elapsed().as_secs_f64() * 1e3);
        if opens_files {
            let files: std::io::Result<Vec<File>> =
                (0..100).map(|_| File::open("/proc/self/status")).collect();
            files.context("the application cannot open its own files")?;
        }
        drop(group);
    }
    Ok(took)
}

fn idle(connections: usize) -> Result<()> {
    open_many_files()?;
    let mut rank = Other::start(&["rank", &GROUPS.to_string()])?;
    let mut report = serde_json::Map::new();
    let quiet: serde_json::Value = serde_json::from_str(&rank.go()?)?;
    report.insert("without idle clients".into(), quiet);
    for (port, address) in ["data port", "metrics"].into_iter().zip(rank.addresses.clone()) {
        let crowd = Crowd::start(address, connections);
        crowd.wait_for(connections)?;
        let mut found: serde_json::Value = serde_json::from_str(&rank.go()?)?;
        found["connections_opened"] = crowd.end().into();
        report.insert(port.into(), found);
    }
    println!("{}", serde_json::Value::from(report));
    Ok(())
}

// ---- garbage ------------------------------------------------------------------------------------------------------------

fn garbage(megabytes: usize) -> Result<()> {
    let server = Other::start(&["serve", "1"])?;
    let at_rendezvous = pelt(&server, megabytes)?;
    let address = server.addresses[0];
    let server_address = HostPort::new(address.ip().to_string(), address.port())?;
    let identity = Identity {
        rank: Some(Rank(0)),
        local_rank: None,
        node_rank: None,
        world_size: 1,
        epoch: Some(Epoch(1)),
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    let client = Client::connect(server_address, Secret::new(SECRET), security()?, identity, deadline)?;
    let candidate = Candidate {
        host: "here".into(),
        pid: 1,
        cpus: Cpus::default(),
        data_address: None,
        wanted: BackendChoice::Tcp,
        capabilities: vec![Capability::usable(BackendKind::Tcp)],
    };
    client.join(candidate, deadline).context("a valid rank cannot join any more")?;

    let mut rank = Other::start(&["rank", "1"])?;
    let at_rank = pelt(&rank, megabytes)?;
    rank.go().context("no group can be made any more")?;
    println!("{}", json!({ "megabytes": megabytes, "rendezvous": at_rendezvous, "rank": at_rank }));
    Ok(())
}

// ---- refusals -----------------------------------------------------------------------------------------------------------

/// Length of the opening message of each end of a handshake.
const OPENING: usize = 40;
const PROOF: usize = 32;

fn refusals(tries: usize) -> Result<()> {
    let (server, rank) = (Other::start(&["serve", "1"])?, Other::start(&["rank", "1"])?);
    let (rendezvous, data) = (server.addresses[0], rank.addresses[0]);
    let recorded = record_handshake(rendezvous)?;
    let mut random = File::open("/dev/urandom")?;
    let mut proof = [0; OPENING + PROOF];
    random.read_exact(&mut proof)?;
    let wrong = [&recorded[..OPENING], &proof[..PROOF]].concat();
    let measured = |attack: &dyn Fn() -> Result<Duration>| -> Result<serde_json::Value> {
        let mut took = (0..tries).map(|_| attack()).collect::<Result<Vec<_>>>()?;
        took.sort_unstable();
        let ms = |index: usize| took[index].as_secs_f64() * 1e3;
        Ok(
            json!({ "tries": tries, "p50_ms": ms(tries / 2), "p99_ms": ms(tries * 99 / 100), "longest_ms": ms(tries - 1) }),
        )
    };
    let at_data_port = || {
        let mut stream = connected(data)?;
        let mut said = [0; OPENING];
        stream.read_exact(&mut said)?;
        // The beginning of the acceptor's opening, with another nonce.
        said[8..].copy_from_slice(&proof[8..OPENING]);
        closed_after(stream, &[&said[..], &proof[..PROOF]].concat())
    };
    println!(
        "{}",
        json!({
            "rendezvous": {
                "wrong proof": measured(&|| closed_after(connected(rendezvous)?, &wrong))?,
                "recorded handshake": measured(&|| closed_after(connected(rendezvous)?, &recorded))?,
                "no proof": measured(&|| closed_after(connected(rendezvous)?, &recorded[..OPENING]))?,
            },
            "data port": {
                "wrong proof": measured(&at_data_port)?,
                "no proof": measured(&|| closed_after(connected(data)?, &[]))?,
            },
        })
    );
    Ok(())
}

fn connected(address: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Sends these bytes, and nothing more, and waits until the other end closes the connection. Returns the time that this took.
fn closed_after(mut stream: TcpStream, words: &[u8]) -> Result<Duration> {
    let started = Instant::now();
    // The other end may close the connection before the last byte.
    let _ = stream.write_all(words);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => Err(error.into()),
        _ => Ok(started.elapsed()),
    }
}

/// Records what a rank that knows the secret sends to a rendezvous until it is admitted.
fn record_handshake(rendezvous: SocketAddr) -> Result<Vec<u8>> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let between = listener.local_addr()?;
    let recorder = std::thread::spawn(move || -> Result<Vec<u8>> {
        let (mut client, mut server) = (listener.accept()?.0, TcpStream::connect(rendezvous)?);
        let mut answers = (server.try_clone()?, client.try_clone()?);
        std::thread::spawn(move || std::io::copy(&mut answers.0, &mut answers.1));
        let mut said = vec![0; OPENING + 2 * PROOF];
        for piece in [0..OPENING, OPENING..OPENING + PROOF, OPENING + PROOF..OPENING + 2 * PROOF] {
            client.read_exact(&mut said[piece.clone()])?;
            server.write_all(&said[piece])?;
        }
        Ok(said)
    });
    let stream = TcpStream::connect(between)?;
    stream.set_nonblocking(true)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let stream = tokio::net::TcpStream::from_std(stream)?;
        let secret = Secret::new(SECRET);
        Ok::<_, anyhow::Error>(handshake::connect(stream, &secret, &security()?, Protection::Clear).await?)
    })?;
    recorder.join().map_err(|_| anyhow::anyhow!("the recorder has panicked"))?
}

/// Writes random bytes to the first address of a process, over one connection after the other, and returns the growth of its
/// memory.
fn pelt(other: &Other, megabytes: usize) -> Result<serde_json::Value> {
    const CHUNK: usize = 64 << 10;
    let before = other.memory("VmRSS")?;
    let (mut bytes, mut left, mut connections) = (vec![0; CHUNK], megabytes << 20, 0_u64);
    let mut random = File::open("/dev/urandom")?;
    let started = Instant::now();
    while left > 0 {
        let mut stream = TcpStream::connect(other.addresses[0])?;
        stream.set_write_timeout(Some(Duration::from_secs(5)))?;
        connections += 1;
        // Until the other end closes the connection.
        loop {
            random.read_exact(&mut bytes)?;
            left = left.saturating_sub(CHUNK);
            if left == 0 || stream.write_all(&bytes).is_err() {
                break;
            }
        }
    }
    let peak = other.memory("VmHWM")?;
    Ok(json!({
        "connections": connections,
        "seconds": started.elapsed().as_secs_f64(),
        "memory_growth_mb": (peak.saturating_sub(before) as f64 / 102.4).round() / 10.0,
    }))
}
