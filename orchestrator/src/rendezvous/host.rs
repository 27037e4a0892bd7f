//! The server of the rendezvous in rank 0, if `ryz launch` did not start the ranks.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ryzanstein_config::{Config, HostPort};
use ryzanstein_process_group::security::Security;
use ryzanstein_process_group::{Epoch, Error, Result, Secret};

use super::client::{Client, Identity};
use super::server::Server;
use super::{listen, secret};

/// Timeout of rank 0 for the others to disconnect at the end.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The server in this process, and this rank's own connection to it.
pub(super) struct Host {
    /// Taken only by drop.
    client: Option<Client>,
    server: Server,
    secret_file: Option<PathBuf>,
}

impl Host {
    /// Serves at `address`, with the given secret, or with a fresh one that it leaves in the file.
    pub(super) fn start(
        config: &Config,
        identity: Identity,
        server: HostPort,
        address: SocketAddr,
        (given, shared): (Option<Secret>, PathBuf),
        deadline: Instant,
    ) -> Result<Self> {
        let listener = listen::bind(address).map_err(|error| {
            Error::Rendezvous(listen::explain(&server, &error, "MASTER_ADDR and MASTER_PORT"))
        })?;
        let (secret, secret_file) = if let Some(secret) = given {
            (secret, None)
        } else {
            // Only the process that bound the port writes the file.
            let secret = Secret::random();
            secret::to_file(&secret, &shared).map_err(|error| {
                Error::Rendezvous(format!(
                    "cannot leave the secret for the other ranks in {}: {error}",
                    shared.display()
                ))
            })?;
            (secret, Some(shared))
        };
        let epoch = identity.epoch.unwrap_or(Epoch(1));
        let security = Security::new(&config.security)?;
        let (ranks, protected) = (identity.world_size, security.clone());
        let hosting = Server::start(listener, secret.clone(), protected, ranks, epoch, &config.rendezvous)
            .map_err(Error::system("cannot serve the rendezvous"))?;
        let client = Client::connect(server, secret, security, identity, deadline)?;
        Ok(Self { client: Some(client), server: hosting, secret_file })
    }

    pub(super) fn client(&self) -> &Client {
        self.client.as_ref().unwrap_or_else(|| unreachable!("the client is taken only on drop"))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Only connecting needs the secret, and this job is over.
        if let Some(path) = &self.secret_file {
            let _ = std::fs::remove_file(path);
        }
        drop(self.client.take());
        // Other ranks may still wait for an answer.
        let deadline = Instant::now() + DISCONNECT_TIMEOUT;
        while self.server.connections() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
