//! Implementations of the collectives.

pub(crate) mod factory;
mod history;
pub(crate) mod host;
pub(crate) mod kind;
pub(crate) mod loopback;
pub(crate) mod nccl;
pub(crate) mod select;
pub(crate) mod stream;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::operation::CallFingerprint;
use crate::paths::{Path, PathTable};
use kind::BackendKind;
use stream::{StreamCapture, Watchdog};

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

/// One rank's end of a group. Calls come one at a time, checked; see [`Call`] for which buffers are there.
pub trait Backend: Send {
    /// What kind this is.
    fn kind(&self) -> BackendKind;

    /// Does a call, or enqueues it on a stream.
    ///
    /// # Errors
    /// After any error the state of the other ranks is unknown: the caller must [`abort`](Self::abort).
    fn submit(&mut self, call: Call<'_>) -> Result<Completion>;

    /// The paths of the group, and which of them a call takes and why.
    fn paths(&self) -> PathTable;

    /// Makes the next calls take `path`, or choose for themselves again.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the path is not one of [`paths`](Self::paths).
    fn force(&mut self, path: Option<Path>) -> Result<()>;

    /// Tells the others, as far as possible, that this rank gives up, and why. Never blocks.
    fn abort(&mut self, why: &Error);
}

/// A backend whose calls are enqueued on streams of a GPU: [`Backend::submit`] on the device's compute stream.
pub(crate) trait StreamBackend: Backend {
    /// The GPU whose memory the buffers of calls are in.
    fn device(&self) -> &Device;

    /// Begins a call on a second stream, behind what the compute stream has been given and beside what it will be given.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn start(&mut self, call: Call<'_>) -> Result<(Completion, Box<dyn StreamWork>)>;

    /// Does several calls, which the backend may take together; each gets a completion.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn group(&mut self, calls: Vec<Call<'_>>, deadline: Instant) -> Result<Vec<Completion>>;

    /// From here on, calls are captured into a graph.
    fn begin_capture(&mut self);

    /// Ends that, and returns what is needed to watch the graph's launches.
    fn end_capture(&mut self) -> Arc<StreamCapture>;

    /// Watches a graph with captured calls, which `launch` launches on the compute stream, or says that it could not.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn replay(
        &mut self,
        captured: &Arc<StreamCapture>,
        deadline: Instant,
        launch: &mut dyn FnMut() -> bool,
    ) -> Result<()>;

    /// Waits until every call that was enqueued is done, at most until the deadline.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn synchronize(&mut self, deadline: Instant) -> Result<()>;

    /// What watches the group.
    fn watchdog(&self) -> &Watchdog;

    /// Where the times of enqueued calls come from.
    fn timings(&self) -> Arc<dyn Timings>;

    /// What this rank's links carry in one direction, in 10⁹ bytes per second, where the hardware is rated.
    fn link_gbs(&self) -> Option<f64>;
}

/// A call that has been started on a stream of its own.
pub(crate) trait StreamWork: Send {
    /// Waits until it is done, at most until the call's deadline.
    ///
    /// # Errors
    /// Those of the call.
    fn wait(&mut self) -> Result<()>;

    /// Errors if the call has failed so far.
    ///
    /// # Errors
    /// Those of the call.
    fn check(&self) -> Result<()>;

    /// Makes the compute stream wait for its end, however it ends; returns at once.
    ///
    /// # Errors
    /// Those of the GPU.
    fn join(&mut self) -> Result<()>;
}

/// Where times come from that only the GPU knows, some time after the call.
pub(crate) trait Timings: Send + Sync {
    /// Calls that were done since the last time this was asked, and how long each took. Never waits.
    fn take(&self) -> Vec<(CallFingerprint, Path, Duration)>;
}
