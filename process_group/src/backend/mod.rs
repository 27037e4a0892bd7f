//! Implementations of the collectives.

pub mod loopback;
pub(crate) mod tcp;

use std::fmt;

use crate::buffer::{Memory, View, ViewMut};
use crate::call::Call;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::roster::BackendKind;

/// How a call went.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Path {
    /// Nothing to send: a group of one.
    Local,
    /// Through the shared memory of one process.
    Loopback,
    /// Over TCP links with this schedule.
    Tcp(crate::schedule::Algorithm),
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.pad("local"),
            Self::Loopback => f.pad("loopback"),
            Self::Tcp(algorithm) => f.pad(&format!("tcp/{algorithm}")),
        }
    }
}

/// What a backend says when it has taken a call. On host memory the call is done by then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The path taken.
    pub path: Path,
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
