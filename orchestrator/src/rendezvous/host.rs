//! The server of the rendezvous in rank 0, if `ryz launch` did not start the ranks.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ryzanstein_config::{Config, HostPort};
use ryzanstein_process_group::security::Security;
use ryzanstein_process_group::{Candidate, Epoch, Error, Membership, Rendezvous as _, Result, Secret};
use tempfile::TempPath;

use super::client::{Client, Identity};
use super::listen;
use super::secret::SharedFile;
use super::server::Server;

/// Timeout of rank 0 for the others to disconnect at the end.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The server of this process. It stays after the ranks have finalized, so that they may initialize again in any order.
static SERVING: Mutex<Option<Serving>> = Mutex::new(None);

/// A server, and the job that it serves.
struct Serving {
    address: SocketAddr,
    ranks: u32,
    epoch: Epoch,
    secret: Secret,
    server: Arc<Server>,
}

/// The server in this process, and this rank's own connection to it.
#[derive(Debug)]
pub(super) struct Host {
    /// Taken only by drop.
    client: Option<Client>,
    server: Arc<Server>,
    /// The secret for the other ranks until all have joined, if no launcher gave it to them.
    shared: Mutex<Option<TempPath>>,
}

impl Host {
    /// Serves at `address`, with the given secret, or with a random one that it leaves in the file.
    pub(super) fn start(
        config: &Config,
        identity: Identity,
        server: HostPort,
        address: SocketAddr,
        (given, shared): (Option<Secret>, SharedFile),
        deadline: Instant,
    ) -> Result<Self> {
        let security = Security::new(&config.security)?;
        let is_given = given.is_some();
        let (secret, serving) = serve(config, &security, &identity, (&server, address), given)?;
        // Only the process that bound the port leaves the secret.
        let left = (!is_given).then(|| shared.leave(&secret)).transpose();
        let shared = left.map_err(|error| {
            Error::Rendezvous(format!(
                "cannot leave the secret for the other ranks in {}: {error}; set XDG_RUNTIME_DIR to a folder that you can write, \
                 the same for every rank, or RYZ_SECRET_FILE to a file of 32 random bytes",
                shared.folder().display()
            ))
        })?;
        let client = Client::connect(server, secret, security, identity, deadline)?;
        Ok(Self { client: Some(client), server: serving, shared: Mutex::new(shared) })
    }

    /// Joins as the client does, then removes the secret's file: all other ranks are connected, and rank 0 leaves it again when it
    /// initializes again.
    pub(super) fn join(&self, candidate: Candidate, deadline: Instant) -> Result<Membership> {
        let membership = self.client().join(candidate, deadline)?;
        self.forget_secret();
        Ok(membership)
    }

    fn forget_secret(&self) {
        drop(self.shared.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    pub(super) fn client(&self) -> &Client {
        self.client.as_ref().unwrap_or_else(|| unreachable!("the client is taken only on drop"))
    }
}

/// Returns the secret and the server of this job: those of an earlier membership, or new ones.
fn serve(
    config: &Config,
    security: &Security,
    identity: &Identity,
    (name, address): (&HostPort, SocketAddr),
    given: Option<Secret>,
) -> Result<(Secret, Arc<Server>)> {
    let (ranks, epoch) = (identity.world_size, identity.epoch.unwrap_or(Epoch(1)));
    let mut serving = SERVING.lock().unwrap_or_else(PoisonError::into_inner);
    let is_same = |serving: &Serving| {
        (serving.address, serving.ranks, serving.epoch) == (address, ranks, epoch)
            && given.as_ref().is_none_or(|given| *given == serving.secret)
    };
    // Another job may need the port.
    if serving.as_ref().is_some_and(|serving| !is_same(serving)) {
        *serving = None;
    }
    if let Some(serving) = &*serving {
        return Ok((serving.secret.clone(), Arc::clone(&serving.server)));
    }
    let listener = listen::bind(address)
        .map_err(|error| Error::Rendezvous(listen::explain(name, &error, "MASTER_ADDR and MASTER_PORT")))?;
    let secret = given.unwrap_or_else(Secret::random);
    let server = Server::start(listener, secret.clone(), security.clone(), ranks, epoch, &config.rendezvous)
        .map_err(Error::system("cannot serve the rendezvous"))?;
    let server = Arc::new(server);
    *serving = Some(Serving { address, ranks, epoch, secret: secret.clone(), server: Arc::clone(&server) });
    Ok((secret, server))
}

impl Drop for Host {
    fn drop(&mut self) {
        self.forget_secret();
        drop(self.client.take());
        // Other ranks may still wait for an answer, those that join again excepted: they wait for this rank.
        let deadline = Instant::now() + DISCONNECT_TIMEOUT;
        while self.server.connections() > self.server.joining() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
