//! NCCL's communicators of one group, as handles.
//!
//! A group has up to three. The *root* comes from a unique id; other groups are split off it, and nothing else uses it. The
//! *stem* is split off a root. *Calls* run on the third, which is split off the stem and shares NCCL's abort flag with it.
//!
//! Root and stem do not block: what makes or splits them is begun and then asked again and again, so that a rank that is
//! lost holds up nobody beyond the deadline. Calls do block until NCCL has enqueued them, because NCCL starts a thread for
//! each call on a communicator that does not, which costs ten times what the call does. Should a call stay inside NCCL (a
//! peer is gone before it has connected, or the GPU takes no more work), aborting the stem, which no caller ever uses,
//! gets it out; only then is what it ran on freed.

use std::time::Instant;

use super::messages::Peers;
use crate::device::symbols::Handle;
use crate::operation::Signature;

/// Which of a group's communicators.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Root,
    Stem,
    Calls,
}

/// Those that do not block.
#[derive(Default)]
pub(super) struct Trunk {
    pub(super) root: Option<Handle>,
    pub(super) stem: Option<Handle>,
}

/// What calls run on.
#[derive(Default)]
pub(super) struct Calls {
    /// None before it is made and after it has been given up.
    pub(super) handle: Option<Handle>,
    /// The call that is inside NCCL. While there is one, the handle is not freed.
    pub(super) inside: Option<Inside>,
}

/// A caller inside NCCL.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inside {
    /// None for a group of calls.
    pub(super) signature: Option<Signature>,
    /// With whom messages are exchanged.
    pub(super) peers: Peers,
    pub(super) since: Instant,
    pub(super) deadline: Instant,
}

impl Calls {
    /// The handle, while no caller uses it.
    pub(super) fn idle(&self) -> Option<Handle> {
        self.handle.filter(|_| self.inside.is_none())
    }
}
