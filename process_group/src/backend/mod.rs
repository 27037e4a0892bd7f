//! Implementations of the collectives.

mod history;
pub mod loopback;
pub mod nccl;
pub(crate) mod tcp;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::buffer::{Memory, View, ViewMut};
use crate::call::Call;
use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use crate::operation::Signature;
use crate::roster::BackendKind;

/// How a call went.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Path {
    /// Nothing to send: a group of one.
    Local,
    /// Through the shared memory of one process.
    Loopback,
    /// Between GPUs, by NCCL.
    Nccl,
    /// Over TCP links with this schedule.
    Tcp(crate::schedule::Algorithm),
    /// Over TCP links that carry headers only: receivers read payloads from their senders' memory.
    CrossMemory,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.pad("local"),
            Self::Loopback => f.pad("loopback"),
            Self::Nccl => f.pad("nccl"),
            Self::Tcp(algorithm) => f.pad(&format!("tcp/{algorithm}")),
            Self::CrossMemory => f.pad("cross_memory"),
        }
    }
}

/// What a backend says when it has taken a call. On host memory the call is done by then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The path taken.
    pub path: Path,
    /// Whether the call is only enqueued on a GPU's stream, and done when the stream has come past it.
    pub enqueued: bool,
    /// Whether it has only been captured into a graph, and is done when that is launched.
    pub captured: bool,
}

/// A call that runs on a stream of the group's own.
pub trait Ticket: Send {
    /// Waits until it is done, at most until the call's deadline.
    ///
    /// # Errors
    /// Those of the call.
    fn wait(&mut self) -> Result<()>;

    /// Says how it goes so far.
    ///
    /// # Errors
    /// Those of the call.
    fn check(&self) -> Result<()>;

    /// Makes the GPU's compute stream wait for its end, however it ends; returns at once.
    ///
    /// # Errors
    /// Those of the GPU.
    fn follow(&mut self) -> Result<()>;
}

/// Where times come from that only the GPU knows, some time after the call.
pub trait Timings: Send + Sync {
    /// Calls that were done since the last time this was asked, and how long each took. Never waits.
    fn take(&self) -> Vec<(Signature, Path, Duration)>;
}

/// One rank's end of a group. Calls come one at a time, checked; see [`Call`] for which buffers are there.
pub trait Backend: Send {
    /// What kind this is.
    fn kind(&self) -> BackendKind;

    /// Where the buffers of calls must be.
    fn memory(&self) -> Memory {
        Memory::Host
    }

    /// The GPU whose memory that is, if it is one's.
    fn device(&self) -> Option<&Device> {
        None
    }

    /// The GPU's stream on which calls that are [started](Self::start) run.
    fn side(&self) -> Option<&Stream> {
        None
    }

    /// Copies within [`memory`](Self::memory): all that a group of one has to do.
    ///
    /// # Errors
    /// Those of a GPU; on host memory there are none.
    fn copy(&mut self, from: View<'_>, mut to: ViewMut<'_>) -> Result<()> {
        to.host()?.copy_from_slice(from.host()?);
        Ok(())
    }

    /// Does a call.
    ///
    /// # Errors
    /// After any error the state of the other ranks is unknown: the caller must [`abort`](Self::abort).
    fn submit(&mut self, call: Call<'_>) -> Result<Completion>;

    /// Begins a call that runs beside what the caller enqueues next. Only for backends on the memory of a GPU.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    fn start(&mut self, call: Call<'_>) -> Result<(Completion, Box<dyn Ticket>)> {
        Err(Error::invalid(format!(
            "the backend `{}` has no calls of this kind: {}",
            self.kind(),
            call.signature
        )))
    }

    /// Begins a group of calls that the backend may take together.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    fn begin(&mut self) -> Result<()> {
        Ok(())
    }

    /// Ends the group.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    fn end(&mut self, deadline: Instant) -> Result<()> {
        let _ = deadline;
        Ok(())
    }

    /// Waits until every call that was enqueued is done, at most until the deadline.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    fn synchronize(&mut self, deadline: Instant) -> Result<()> {
        let _ = deadline;
        Ok(())
    }

    /// This rank makes no more calls: the others may know how many it has made.
    fn leave(&mut self) {}

    /// Waits until the calls of all members have been compared, where that is done beside the calls, at most until the
    /// deadline, at which it warns. All members do so behind [`leave`](Self::leave).
    ///
    /// # Errors
    /// [`Error::Mismatch`] for other calls, or fewer than another member's; [`Error::PeerLost`] names a member that has made
    /// fewer; [`Error::PeerAborted`] says what another member found. Any other failure of the group, too.
    fn settle(&mut self, deadline: Instant) -> Result<()> {
        let _ = deadline;
        Ok(())
    }

    /// Where the times of enqueued calls come from.
    fn timings(&self) -> Option<Arc<dyn Timings>> {
        None
    }

    /// From `true` to `false`, calls are captured into a graph; then returns what is needed to follow its replays. Only for
    /// backends on the memory of a GPU.
    fn record(&mut self, recording: bool) -> Option<Arc<nccl::Captured>> {
        let _ = recording;
        None
    }

    /// Follows a graph with captured calls, which `launch` launches on the device's stream, or says that it could not.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    fn replay(
        &mut self,
        captured: &Arc<nccl::Captured>,
        deadline: Instant,
        launch: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let _ = (captured, deadline, launch());
        Ok(())
    }

    /// What this rank's links carry in one direction, in 10⁹ bytes per second, where the hardware is rated.
    fn link_gbs(&self) -> Option<f64> {
        None
    }

    /// Every path that calls may take, for the start-up check.
    fn paths(&self) -> Vec<Path>;

    /// Makes the next calls take `path`, or choose for themselves again.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the path is not one of [`paths`](Self::paths).
    fn force(&mut self, path: Option<Path>) -> Result<()>;

    /// Tells the others, as far as possible, that this rank gives up, and why. Never blocks.
    fn abort(&mut self, why: &Error);
}
