//! The communication of the layers.

use std::error::Error as StdError;

use ryzanstein_process_group::{Buffer, BufferMut, ProcessGroup, ReduceOp};

use crate::error::{ConfigurationError, Error, Result};
use crate::shard::ShardError;

/// The ranks that share the weights of a layer: a [`ProcessGroup`], or an engine's own communicator.
///
/// Every rank makes the same calls in the same order. A communicator on CPUs gets its elements from [`ViewMut::host`] and their
/// type from [`ViewMut::dtype`].
///
/// ```
/// use ryzanstein_process_group::BufferMut;
/// use ryzanstein_tensor_parallel::{Communicator, Error, Result};
///
/// /// A communicator of some engine.
/// struct Engine;
/// # impl Engine {
/// #     fn size(&self) -> usize { 1 }
/// #     fn sum(&mut self, _: &mut [f32]) -> std::io::Result<()> { Ok(()) }
/// # }
///
/// impl Communicator for Engine {
///     fn world_size(&self) -> usize {
///         self.size()
///     }
///
///     fn all_reduce_sum(&mut self, values: &mut dyn BufferMut) -> Result<()> {
///         let mut view = values.view_mut();
///         // This engine computes in f32 only.
///         let values: &mut [f32] = view.elements_mut()?;
///         self.sum(values).map_err(Error::communicator)
///     }
/// }
/// ```
///
/// [`ViewMut::host`]: ryzanstein_process_group::ViewMut::host
/// [`ViewMut::dtype`]: ryzanstein_process_group::ViewMut::dtype
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot communicate for a layer",
    label = "this is neither a `ProcessGroup` nor a `Communicator`",
    note = "pass a `ProcessGroup`, or implement `Communicator` for your own: `world_size` and `all_reduce_sum`"
)]
pub trait Communicator {
    /// Returns the number of ranks.
    fn world_size(&self) -> usize;

    /// Replaces the values on every rank by their sum over all ranks, the same bits everywhere.
    ///
    /// # Errors
    /// Returns [`Error::Communicator`] or [`Error::Group`] if the communication fails.
    fn all_reduce_sum(&mut self, values: &mut dyn BufferMut) -> Result<()>;

    /// Writes the values of all ranks into `all`, in the order of the ranks. Only [`ParallelLmHead`], layers with
    /// [`gather_output`], and row-parallel layers with invariant numerics call it.
    ///
    /// # Errors
    /// As [`all_reduce_sum`](Self::all_reduce_sum). The default returns an error.
    ///
    /// [`ParallelLmHead`]: crate::embedding::ParallelLmHead
    /// [`gather_output`]: crate::linear::ColumnOptions::gather_output
    fn all_gather(&mut self, mine: &dyn Buffer, all: &mut dyn BufferMut) -> Result<()> {
        let _ = (mine, all);
        Err(Error::communicator(
            "it has no all-gather, which this layer needs; implement `Communicator::all_gather`",
        ))
    }

    /// Returns the process group that carries the calls, if one does. Layers may make other calls of it instead: its kernels can combine
    /// a call with what follows.
    fn process_group(&mut self) -> Option<&mut ProcessGroup> {
        None
    }
}

impl Communicator for ProcessGroup {
    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn all_reduce_sum(&mut self, values: &mut dyn BufferMut) -> Result<()> {
        Ok(self.all_reduce(values, ReduceOp::Sum)?)
    }

    fn all_gather(&mut self, mine: &dyn Buffer, all: &mut dyn BufferMut) -> Result<()> {
        Ok(self.all_gather_into(mine, all)?)
    }

    fn process_group(&mut self) -> Option<&mut ProcessGroup> {
        Some(self)
    }
}

/// The shard of the weights that a rank holds: that of its rank in a group of `world_size`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shard {
    rank: usize,
    world_size: usize,
}

impl Shard {
    /// Returns the shard of a rank.
    ///
    /// # Errors
    /// Returns an error if the group has no such rank.
    pub(crate) fn new(rank: usize, world_size: usize) -> Result<Self, ShardError> {
        if rank < world_size {
            return Ok(Self { rank, world_size });
        }
        Err(ShardError::NoRank { rank, world_size })
    }

    pub(crate) fn rank(self) -> usize {
        self.rank
    }

    pub(crate) fn world_size(self) -> usize {
        self.world_size
    }

    /// Checks that the group of a call has this shard at this rank. An engine's own communicator tells only its world size.
    ///
    /// # Errors
    /// Returns [`ConfigurationError::OtherGroup`] if not.
    pub(crate) fn check(self, group: &mut dyn Communicator) -> Result<()> {
        let Self { rank, world_size } = self;
        let called_world_size = group.world_size();
        let called_rank = group.process_group().map_or(rank, |group| group.rank().index());
        if (called_rank, called_world_size) == (rank, world_size) {
            return Ok(());
        }
        Err(ConfigurationError::OtherGroup { rank, world_size, called_rank, called_world_size }.into())
    }
}

impl Error {
    /// Wraps an error of an engine's [`Communicator`].
    pub fn communicator(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Communicator(error.into())
    }
}
