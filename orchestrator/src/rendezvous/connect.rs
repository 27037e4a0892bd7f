//! Finds the rendezvous of this process from its environment variables.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ryzanstein_config::{Config, HostPort, WorldSize};
use ryzanstein_process_group::security::Security;
use ryzanstein_process_group::{
    Candidate, Epoch, Error, LocalRank, Membership, MemoryRendezvous, Rank, Rendezvous, Result, Secret,
};

use super::client::{Client, Identity, Unconnected, WeakClient};
use super::host::Host;
use super::placement::number;
use super::secret::SharedFile;
use super::{placement, secret};

/// Interval between two attempts to look a name up.
const LOOKUP_INTERVAL: Duration = Duration::from_millis(200);

/// Environment variables by name.
pub type Environment = BTreeMap<String, String>;

/// Returns the environment of this process, without variables that are not Unicode. Ours are kept with U+FFFD in place of what is
/// not, for [`Config::load`] to refuse.
pub fn process_environment() -> Environment {
    std::env::vars_os().filter_map(|(name, value)| variable(&name, &value)).collect()
}

fn variable(name: &OsStr, value: &OsStr) -> Option<(String, String)> {
    let (name, is_ours) = (name.to_string_lossy(), name.as_encoded_bytes().starts_with(b"RYZ_"));
    let value = value.to_string_lossy();
    let is_text = !name.contains(char::REPLACEMENT_CHARACTER) && !value.contains(char::REPLACEMENT_CHARACTER);
    (is_ours || is_text).then(|| (name.into_owned(), value.into_owned()))
}

/// The rendezvous of this process.
#[derive(Debug)]
pub struct Connection {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    InProcess(MemoryRendezvous),
    Client(Client),
    Host(Host),
}

/// Chooses the rendezvous and connects to it:
///
/// * `RYZ_RENDEZVOUS` is set: the launcher's, with the secret from the descriptor `RYZ_SECRET_FD` or the file
///   `RYZ_SECRET_FILE`.
/// * `MASTER_ADDR` and `MASTER_PORT` are set by another launcher: rank 0 serves one there for as long as the returned
///   value lives, and the others connect. The secret is in `RYZ_SECRET_FILE`. Where all ranks are on this machine, on a
///   loopback address, that may be absent: rank 0 then leaves a secret in a file of mode 0600 in `XDG_RUNTIME_DIR` or
///   the temporary folder, named by user, port and random characters, until all have joined.
/// * Another launcher has set variables of its own, as [`placement`] reads them: the same as with `MASTER_ADDR`.
/// * None of these: this process is the only rank.
///
/// # Errors
/// [`Error::Configuration`] when the variables do not fit together, [`Error::Rendezvous`] when no server answers within
/// `rendezvous.timeout`.
pub fn connect(config: &Config, environment: &Environment) -> Result<Connection> {
    let deadline = Instant::now() + config.rendezvous.timeout.get();
    if let Some(placement) = placement::detect(config.rendezvous.launcher, environment)? {
        tracing::info!("{placement}");
    }
    let environment = &placement::translated(config, environment)?;
    let kind = if let Some(address) = environment.get("RYZ_RENDEZVOUS") {
        let server: HostPort =
            address.parse().map_err(|error| Error::Configuration(format!("RYZ_RENDEZVOUS: {error}")))?;
        let secret = configured_secret(environment)?.ok_or_else(|| {
            Error::Configuration(
                "RYZ_RENDEZVOUS is set, but neither RYZ_SECRET_FD nor RYZ_SECRET_FILE; start this process with `ryz launch`".into(),
            )
        })?;
        let security = Security::new(&config.security)?;
        Kind::Client(Client::connect(server, secret, security, identity(config, environment)?, deadline)?)
    } else if let Some(host) = environment.get("MASTER_ADDR") {
        let port = number(environment, "MASTER_PORT")?.ok_or_else(|| {
            Error::Configuration("MASTER_ADDR is set, but MASTER_PORT is not; set both".into())
        })?;
        let port = u16::try_from(port).ok().filter(|port| *port != 0).ok_or_else(|| {
            Error::Configuration(format!("MASTER_PORT is {port}, not a port from 1 to 65535"))
        })?;
        let host = host.trim();
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let server = HostPort::new(address.filter(|host| host.contains(':')).unwrap_or(host), port);
        let server = server.map_err(|_| {
            Error::Configuration(format!(
                "MASTER_ADDR is `{host}`; expected a host without a port, such as `node0`; set its port as MASTER_PORT"
            ))
        })?;
        from_master_address(config, environment, server, deadline)?
    } else {
        single_process(config, environment)?
    };
    Ok(Connection { kind })
}

impl From<MemoryRendezvous> for Connection {
    /// Creates the connection of a rank that is a thread of this process.
    fn from(memory: MemoryRendezvous) -> Self {
        Self { kind: Kind::InProcess(memory) }
    }
}

impl Connection {
    /// Reports the reason why this rank gives up, so that the launcher can name the cause. Does nothing without a launcher. Returns
    /// true if the launcher knows the reason now.
    pub fn report_failure(&self, error: &Error, last_call: Option<&str>) -> bool {
        self.report(&error.root_cause().to_string(), last_call, error.caused_by().first().copied())
    }

    /// Does the same as [`Connection::report_failure`], for an error given as text. `caused_by` is the rank whose failure made
    /// this one fail, if there is one.
    pub fn report(&self, cause: &str, last_call: Option<&str>, caused_by: Option<Rank>) -> bool {
        let Kind::Client(client) = &self.kind else { return false };
        let (last_call, caused_by) = (last_call.map(str::to_owned), caused_by.map(|rank| rank.0));
        let reported = client.report(cause.to_owned(), last_call, caused_by);
        reported.inspect_err(|error| tracing::debug!(%error, "could not report the failure")).is_ok()
    }

    /// Returns the connection to a launcher, which receives heartbeats.
    pub(crate) fn launcher(&self) -> Option<WeakClient> {
        let Kind::Client(client) = &self.kind else { return None };
        Some(client.downgrade())
    }

    fn inner(&self) -> &dyn Rendezvous {
        match &self.kind {
            Kind::InProcess(memory) => memory,
            Kind::Client(client) => client,
            Kind::Host(host) => host.client(),
        }
    }
}

impl Rendezvous for Connection {
    fn local_address(&self) -> Result<IpAddr> {
        self.inner().local_address()
    }

    fn local_rank(&self) -> Option<LocalRank> {
        self.inner().local_rank()
    }

    fn world_size(&self) -> Option<usize> {
        self.inner().world_size()
    }

    fn join(&self, candidate: Candidate, deadline: Instant) -> Result<Membership> {
        match &self.kind {
            Kind::Host(host) => host.join(candidate, deadline),
            _ => self.inner().join(candidate, deadline),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report("the program panicked: see what it wrote to its standard error", None, None);
        }
    }
}

fn world_size(environment: &Environment) -> Result<Option<u32>> {
    let Some(text) = environment.get("WORLD_SIZE") else { return Ok(None) };
    let ranks: WorldSize =
        text.parse().map_err(|error| Error::Configuration(format!("WORLD_SIZE: {error}")))?;
    Ok(Some(ranks.get()))
}

fn identity(config: &Config, environment: &Environment) -> Result<Identity> {
    let world_size = match world_size(environment)? {
        Some(ranks) => ranks,
        None => config.job.world_size.map(WorldSize::get).ok_or_else(|| {
            Error::Configuration("WORLD_SIZE is not set: start this process with `ryz launch`".into())
        })?,
    };
    let rank = number(environment, "RANK")?.map(Rank);
    if let Some(rank) = rank
        && rank.0 >= world_size
    {
        return Err(Error::Configuration(format!(
            "RANK is {rank}, but WORLD_SIZE is {world_size}; ranks count from 0"
        )));
    }
    Ok(Identity {
        rank,
        local_rank: number(environment, "LOCAL_RANK")?.map(LocalRank),
        node_rank: number(environment, "GROUP_RANK")?,
        world_size,
        epoch: number(environment, "RYZ_EPOCH")?.map(|epoch| Epoch(epoch.into())),
    })
}

fn configured_secret(environment: &Environment) -> Result<Option<Secret>> {
    if let Some(number) = environment.get("RYZ_SECRET_FD") {
        return secret::from_descriptor(number).map(Some).map_err(Error::Configuration);
    }
    let Some(path) = environment.get("RYZ_SECRET_FILE") else { return Ok(None) };
    if path.contains(char::REPLACEMENT_CHARACTER) {
        return Err(Error::Configuration(
            "the environment variable RYZ_SECRET_FILE is not UTF-8 text; change it, or leave it out".into(),
        ));
    }
    secret::from_file(path.as_ref()).map(Some).map_err(Error::Configuration)
}

fn single_process(config: &Config, environment: &Environment) -> Result<Kind> {
    let named = world_size(environment)?;
    match named.or(config.job.world_size.map(WorldSize::get)) {
        None | Some(1) => Ok(Kind::InProcess(MemoryRendezvous::new(1).remove(0))),
        Some(ranks) if environment.contains_key("RANK") => Err(Error::Configuration(format!(
            "RANK is set, so this is one of {ranks} ranks, but MASTER_ADDR, the rendezvous address, is not; set RANK, \
             WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank, or unset RANK to start ranks from here"
        ))),
        Some(ranks) => Err(Error::Configuration(format!(
            "this job has {ranks} ranks, but no rendezvous address is set; start them with `ryz launch --world-size \
             {ranks} -- PROGRAM`, or with a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        ))),
    }
}

/// Connects ranks that another launcher started: rank 0 serves the rendezvous at `MASTER_ADDR`.
fn from_master_address(
    config: &Config,
    environment: &Environment,
    server: HostPort,
    deadline: Instant,
) -> Result<Kind> {
    let identity = identity(config, environment)?;
    let Some(rank) = identity.rank else {
        return Err(Error::Configuration(
            "MASTER_ADDR is set, but RANK is not; set RANK and WORLD_SIZE for every rank, or unset MASTER_ADDR to run a \
             single rank"
                .into(),
        ));
    };
    let address = resolve(&server, deadline)?;
    let given = configured_secret(environment)?;
    if given.is_none() && !address.ip().is_loopback() {
        return Err(Error::Configuration(format!(
            "a rendezvous at {server}, which is not a loopback address, needs a secret; set RYZ_SECRET_FILE, for every \
             rank, to a file with mode 0600 that holds the same 32 random bytes"
        )));
    }
    let shared = SharedFile::new(shared_folder(environment), address.port());
    if rank.0 != 0 {
        let security = Security::new(&config.security)?;
        let Some(secret) = given else {
            return connect_with_shared_secret(&server, &shared, &security, &identity, deadline);
        };
        return Ok(Kind::Client(Client::connect(server, secret, security, identity, deadline)?));
    }
    Host::start(config, identity, server, address, (given, shared), deadline).map(Kind::Host)
}

/// Looks a name up until the deadline: the name of another host may be known only after that host has started.
fn resolve(server: &HostPort, deadline: Instant) -> Result<SocketAddr> {
    let started = Instant::now();
    let mut is_told = false;
    loop {
        let why = match (server.host(), server.port()).to_socket_addrs().map(|mut addresses| addresses.next())
        {
            Ok(Some(address)) => return Ok(address),
            Ok(None) => String::new(),
            Err(error) => format!(": {error}"),
        };
        if Instant::now() + LOOKUP_INTERVAL >= deadline {
            return Err(Error::Rendezvous(format!(
                "MASTER_ADDR: `{}` has no address, looked up for {:.1?} (rendezvous.timeout){why}; check the name, and that the \
                 host of rank 0 is up",
                server.host(),
                started.elapsed()
            )));
        }
        if !std::mem::replace(&mut is_told, true) {
            tracing::warn!(
                "MASTER_ADDR: `{}` has no address yet; looking it up until rendezvous.timeout",
                server.host()
            );
        }
        std::thread::sleep(LOOKUP_INTERVAL);
    }
}

/// Connects with the secret that rank 0 writes. The file may not exist yet, or belong to an earlier job.
fn connect_with_shared_secret(
    server: &HostPort,
    shared: &SharedFile,
    security: &Security,
    identity: &Identity,
    deadline: Instant,
) -> Result<Kind> {
    loop {
        let error = match shared.find() {
            Ok(secret) => {
                // Short attempts, so that a newer file is noticed.
                let soon = deadline.min(Instant::now() + Duration::from_secs(1));
                match Client::try_connect(server.clone(), secret, security.clone(), identity.clone(), soon) {
                    Ok(client) => return Ok(Kind::Client(client)),
                    // The secret is right: a newer file cannot change this.
                    Err(Unconnected { error, by_member: true }) => return Err(error),
                    Err(Unconnected { error, by_member: false }) => error,
                }
            }
            Err(why) => Error::Rendezvous(format!(
                "rank 0 has not left the job's secret yet: {why} (it removes the file when all ranks have joined)"
            )),
        };
        if Instant::now() + Duration::from_millis(50) >= deadline {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the folder where rank 0 leaves the secret.
fn shared_folder(environment: &Environment) -> PathBuf {
    ["XDG_RUNTIME_DIR", "TMPDIR"]
        .into_iter()
        .filter_map(|name| environment.get(name))
        .find(|folder| !folder.is_empty())
        .map_or_else(|| PathBuf::from("/tmp"), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn a_variable_that_is_not_text_is_kept_if_it_is_ours() {
        let kept = |name: &str, value: &[u8]| variable(name.as_ref(), OsStr::from_bytes(value));
        assert_eq!(kept("RYZ_CONFIG", b"a"), Some(("RYZ_CONFIG".into(), "a".into())));
        assert_eq!(kept("RYZ_CONFIG", b"\xff"), Some(("RYZ_CONFIG".into(), "\u{fffd}".into())));
        assert_eq!(kept("OTHER", b"\xff"), None);
    }
}
