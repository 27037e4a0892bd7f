//! Checks whether the processes of other ranks respond.
//!
//! A rank accepts links on a thread of its own, which hangs up on a client that has nothing to say: also while the rank computes,
//! but not while its process is stopped, and not across a broken network. A proxy that does not pass on a half-closed connection
//! hides a stopped process.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};

/// Timeout for a process to hang up: long enough for a busy one.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Number of consecutive failed attempts after which a process is unresponsive.
const ATTEMPTS: usize = 2;
/// Time between attempts that succeed. Together with the attempts that fail, a stopped process is found within 4.5 s.
const INTERVAL: Duration = Duration::from_millis(1500);

/// Checks whether processes respond, from the thread that accepts links.
#[derive(Clone, Debug)]
pub(crate) struct Liveness(pub(super) Handle);

/// A process that is checked until this is dropped.
#[derive(Debug)]
pub(crate) struct Pulse {
    is_silent: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Liveness {
    /// Begins to check the process that accepts links at this address.
    pub(crate) fn watch(&self, address: SocketAddr) -> Pulse {
        let is_silent = Arc::new(AtomicBool::new(false));
        let silent = Arc::clone(&is_silent);
        let task = self.0.spawn(async move {
            let mut missed = 0;
            loop {
                let began = Instant::now();
                missed = if responds(address).await { 0 } else { missed + 1 };
                silent.store(missed >= ATTEMPTS, Ordering::Relaxed);
                // An attempt that times out has taken as long already; an unreachable network fails at once.
                sleep_until(began + INTERVAL).await;
            }
        });
        Pulse { is_silent, task: task.abort_handle() }
    }
}

impl Pulse {
    /// Returns true if the process has not responded to the newest attempts.
    pub(crate) fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::Relaxed)
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns true if the process hangs up. One that has ended counts as responding: its links show that it is lost.
async fn responds(address: SocketAddr) -> bool {
    let hung_up = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.shutdown().await?;
        stream.read(&mut [0]).await
    };
    match timeout(PATIENCE, hung_up).await {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => !is_unreachable(error.kind()),
        Err(_) => false,
    }
}

/// Returns true if an error comes from the network, not from the process.
fn is_unreachable(kind: ErrorKind) -> bool {
    use ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    matches!(kind, HostUnreachable | NetworkDown | NetworkUnreachable | TimedOut)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use ryzanstein_config::SecurityConfig;

    use super::super::{Bound, Mesh, Settings};
    use super::*;
    use crate::link::security::Security;
    use crate::membership::roster::Secret;
    use crate::testing::LATE;
    use crate::types::rank::{Epoch, Rank};

    #[test]
    fn a_network_that_is_down_is_silence_and_a_process_that_has_gone_is_not() {
        for kind in [ErrorKind::HostUnreachable, ErrorKind::NetworkUnreachable, ErrorKind::NetworkDown] {
            assert!(is_unreachable(kind), "{kind}");
        }
        for kind in [ErrorKind::ConnectionRefused, ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof] {
            assert!(!is_unreachable(kind), "{kind}");
        }
    }

    #[test]
    fn a_process_that_accepts_and_never_hangs_up_is_silent_and_a_rank_is_not() {
        let bound = || Bound::new(Ipv4Addr::LOCALHOST.into()).unwrap();
        let security = Security::new(&SecurityConfig::default()).unwrap();
        let settings = Settings { handshake: LATE, security };
        let (mine, theirs) = (bound(), bound());
        let address = theirs.address();
        let start = |bound, rank| Mesh::start(bound, Epoch(1), Rank(rank), Secret::new([7; 32]), &settings);
        let (mesh, other) = (start(mine, 0).unwrap(), start(theirs, 1).unwrap());
        // A kernel accepts connections for a stopped process.
        let stopped = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let [rank, stopped] = [address, stopped.local_addr().unwrap()].map(|at| mesh.liveness().watch(at));
        let deadline = Instant::now() + LATE;
        while !stopped.is_silent() {
            assert!(Instant::now() < deadline, "it was not found silent");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(200));
        assert!(!rank.is_silent());
        drop(other);
    }
}
