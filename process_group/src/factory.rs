//! Probes backends, and connects groups with them.

use std::sync::Arc;
use std::time::Instant;

use ryzanstein_config::Config;

use crate::backend::Backend;
use crate::device::{Device, LibrarySearch};
use crate::error::{Error, Result};
use crate::link::mesh::{Mesh, Peers, Unconnected};
use crate::link::security::Channel;
use crate::membership::capability::Capability;
use crate::membership::roster::Member;
use crate::membership::store::Store;
use crate::paths::tuned::TunedRange;
use crate::stream::StreamGroup;
use crate::types::backend_kind::BackendKind;
use crate::types::rank::{LocalRank, Rank};

/// Facts that a rank knows before it joins.
pub(crate) struct ProbeContext<'a> {
    pub(crate) config: &'a Config,
    pub(crate) search: &'a LibrarySearch,
    /// The GPU that an engine provides.
    pub(crate) device: Option<&'a Device>,
    /// The rank's position on its host, if it is already known.
    pub(crate) local_rank: Option<LocalRank>,
    /// Ok if the rank listens for links of the other ranks, or the reason why it does not.
    pub(crate) listens: Result<()>,
}

/// The ranks that make a group at the same time.
#[derive(Clone, Copy)]
pub(crate) enum Together<'a> {
    /// Every rank of the job makes a group of this kind.
    Everybody(&'a str),
    /// Only its members.
    Members,
}

/// A group to connect.
pub(crate) struct GroupSpec<'a> {
    pub(crate) name: &'a str,
    /// This rank's position in the group.
    pub(crate) rank: Rank,
    /// The members, in group order.
    pub(crate) members: Vec<&'a Member>,
    /// True if this rank shares its CPUs with more ranks of the job than there are CPUs.
    pub(crate) cpus_are_short: bool,
    pub(crate) together: Together<'a>,
    pub(crate) config: &'a Config,
    /// Measured ranges for groups of all ranks, if this is one.
    pub(crate) tuned: &'a [TunedRange],
    pub(crate) store: &'a Arc<dyn Store>,
    /// Links to the other ranks, if there are any.
    pub(crate) mesh: Option<&'a Mesh>,
    pub(crate) deadline: Instant,
}

impl GroupSpec<'_> {
    /// Connects one link to each other member.
    ///
    /// # Errors
    /// Names the members that were not reached, with the connections that were made.
    pub(crate) fn connect(&self) -> Result<Peers<Channel>, Box<Unconnected>> {
        match self.mesh {
            Some(mesh) => mesh.connect(self.name, &self.members, self.deadline),
            None if self.members.len() == 1 => Ok(Peers::from_fn(0, 1, |_| unreachable!("no other member"))),
            None => Err(Box::new(Unconnected {
                error: Error::Transport("this rank does not listen for links of the others".into()),
                connections: Vec::new(),
            })),
        }
    }
}

/// A backend of a group: its calls finish on host memory before they return, or run on streams of a GPU.
pub(crate) enum AnyBackend {
    Cpu(Box<dyn Backend>),
    Stream(Box<StreamGroup>),
}

impl AnyBackend {
    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Self::Cpu(backend) => &**backend,
            Self::Stream(backend) => &**backend,
        }
    }

    pub(crate) fn backend_mut(&mut self) -> &mut dyn Backend {
        match self {
            Self::Cpu(backend) => &mut **backend,
            Self::Stream(backend) => &mut **backend,
        }
    }

    pub(crate) fn stream(&self) -> Option<&StreamGroup> {
        match self {
            Self::Cpu(_) => None,
            Self::Stream(backend) => Some(&**backend),
        }
    }

    pub(crate) fn stream_mut(&mut self) -> Option<&mut StreamGroup> {
        match self {
            Self::Cpu(_) => None,
            Self::Stream(backend) => Some(&mut **backend),
        }
    }
}

/// Makes the groups of one backend on this rank.
pub(crate) trait BackendFactory: Send {
    /// Returns the kind of the backend.
    fn kind(&self) -> BackendKind;

    /// Checks, before this rank joins, whether it can use the backend, and takes the resources that it would use.
    fn probe(&mut self, context: &ProbeContext<'_>) -> Capability;

    /// Connects a group, together with all its members. Called when all ranks have selected this backend.
    ///
    /// # Errors
    /// Names the members that did not arrive by the deadline.
    fn connect(&mut self, group: &GroupSpec<'_>) -> Result<AnyBackend>;
}
