//! Sources of a rank's weights: its own files, the files of one rank, or memory.

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::{Buffer as _, DType, ProcessGroup, Rank};
use serde::{Deserialize, Serialize};

use super::Checkpoint;
use super::slice::{self, StoredMatrix};
use crate::communicator::Shard;
use crate::compute::Compute;
use crate::error::{Error, RemoteError, Result};
use crate::model::Stage;
use crate::storage::with_elements;
use crate::tensor::{Tensor, element_count};

/// Approximate size of a message of weights: large enough to be fast, small enough to need little extra memory.
const MESSAGE_BYTES: usize = 16 << 20;

/// A rank's slice of a tensor of the checkpoint.
#[derive(Clone, Debug)]
pub struct TensorSlice<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// Its whole shape.
    pub shape: &'a [usize],
    /// The rows that the rank holds.
    pub rows: Range<usize>,
    /// The columns that the rank holds. A vector is one column.
    pub columns: Range<usize>,
}

impl<'a> TensorSlice<'a> {
    /// Creates a slice that is the whole tensor.
    pub fn whole(name: &'a str, shape: &'a [usize]) -> Self {
        let rows = shape.first().copied().unwrap_or(1);
        // A count that overflows is larger than that of any tensor, and is refused as such.
        let columns = shape.iter().skip(1).fold(1usize, |columns, n| columns.saturating_mul(*n));
        Self { name, shape, rows: 0..rows, columns: 0..columns }
    }

    /// Checks that the tensor has these rows and columns, and that they fit the rows of `target` from row `at` on.
    pub(super) fn check(&self, target: &Tensor, at: usize) -> Result<()> {
        let (whole, Self { name, shape, rows, columns }) = (Self::whole(self.name, self.shape), self);
        let fits = rows.start <= rows.end
            && rows.end <= whole.rows.end
            && columns.start <= columns.end
            && columns.end <= whole.columns.end
            && columns.len() == target.columns()
            && at.checked_add(rows.len()).is_some_and(|end| end <= target.rows());
        if fits {
            return Ok(());
        }
        Err(Error::input(format!(
            "rows {rows:?} and columns {columns:?} of tensor `{name}` {shape:?} do not fit a target of {:?} at row {at}",
            target.shape()
        )))
    }
}

/// A source that fills tensors with this rank's slices of the weights. All ranks request the same tensors in the same order.
#[diagnostic::on_unimplemented(
    message = "a loader cannot read weights from `{Self}`",
    note = "pass `&mut &checkpoint` for a folder, a `&mut MemorySource` for tensors in memory, or implement `WeightSource`"
)]
pub trait WeightSource {
    /// Copies this rank's slice into the rows of `target` from row `at` on, rounded to its type.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or cannot be read, or if the rank that sends it fails.
    fn fill(&mut self, tensor: &TensorSlice<'_>, target: &mut Tensor, at: usize) -> Result<()>;
}

impl WeightSource for &Checkpoint {
    fn fill(&mut self, slice: &TensorSlice<'_>, target: &mut Tensor, at: usize) -> Result<()> {
        self.read_into(slice, target, at)
    }
}

/// Whole tensors in memory, by name.
#[derive(Debug)]
pub struct MemorySource<'a> {
    /// The tensors, on the host.
    pub tensors: &'a HashMap<String, Tensor>,
}

impl WeightSource for MemorySource<'_> {
    fn fill(&mut self, tensor: &TensorSlice<'_>, target: &mut Tensor, at: usize) -> Result<()> {
        let Some(whole) = self.tensors.get(tensor.name) else {
            return Err(Error::input(format!("there is no tensor `{}`", tensor.name)));
        };
        if whole.shape() != tensor.shape {
            return Err(Error::input(format!(
                "tensor `{}`: expected shape {:?}, found {:?}",
                tensor.name,
                tensor.shape,
                whole.shape()
            )));
        }
        tensor.check(target, at)?;
        let stored =
            StoredMatrix { bytes: whole.view().host()?, dtype: whole.dtype(), columns: whole.columns() };
        slice::copy(stored, tensor.rows.clone(), &tensor.columns, target, at)
    }
}

/// Weights that one rank reads and sends to the others.
///
/// Loading takes rounds in which every rank takes part, whatever it loads. In each round, every rank tells all others which slice
/// it needs next, and the root sends each rank its slice. So the next round reports a failed rank, and no rank waits for it.
#[derive(Debug)]
pub struct RootSource<'a> {
    checkpoint: Option<&'a Checkpoint>,
    root: Rank,
    group: &'a mut ProcessGroup,
    /// The root's error in reading a slice that it had to send.
    unread: Option<Error>,
    /// True if all ranks have been told of a failure.
    failure_known: bool,
}

/// The message of a rank to all others in a round.
#[derive(Serialize, Deserialize)]
enum Need {
    Slice(Slice),
    /// All weights have been loaded.
    Nothing,
    Failed(RemoteError),
}

/// Rows and columns of a tensor, and the type in which they are sent.
#[derive(Clone, Serialize, Deserialize)]
struct Slice {
    name: String,
    shape: Vec<usize>,
    rows: Range<usize>,
    columns: Range<usize>,
    dtype: DType,
}

impl Slice {
    /// Iterates over the row ranges of the messages.
    fn messages(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let step = (MESSAGE_BYTES / (self.columns.len() * self.dtype.size()).max(1)).max(1);
        let rows = self.rows.clone();
        rows.clone().step_by(step).map(move |start| start..rows.end.min(start + step))
    }

    fn read_into(
        &self,
        checkpoint: &Checkpoint,
        rows: Range<usize>,
        target: &mut Tensor,
        at: usize,
    ) -> Result<()> {
        let (name, shape, columns) = (&*self.name, &*self.shape, self.columns.clone());
        checkpoint.read_into(&TensorSlice { name, shape, rows, columns }, target, at)
    }
}

impl<'a> RootSource<'a> {
    /// Creates a source for the ranks of `group`, in which `root` has the files.
    pub fn new(checkpoint: Option<&'a Checkpoint>, root: Rank, group: &'a mut ProcessGroup) -> Self {
        Self { checkpoint, root, group, unread: None, failure_known: false }
    }

    /// Serves the other ranks until all have their weights. Returns the result of this rank; if one rank has failed, all fail.
    ///
    /// # Errors
    /// Returns this rank's own error; otherwise [`Error::Peer`] with that of another rank.
    pub fn finish<T>(mut self, mut built: Result<T>) -> Result<T> {
        while !self.failure_known {
            let need = match &built {
                Ok(_) => Need::Nothing,
                Err(error) => Need::Failed(error.into()),
            };
            match self.round(&need, None) {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => return Err(built.err().unwrap_or(error)),
            }
            if let Some(error) = self.unread.take() {
                built = Err(error);
            }
        }
        built
    }

    /// Does one round. Returns true if all ranks have their weights.
    fn round(&mut self, mine: &Need, mut target: Option<(&mut Tensor, usize)>) -> Result<bool> {
        let needs = self.group.without_profiling(|group| group.all_gather_object(mine))?;
        for (rank, need) in self.group.members().iter().zip(&needs) {
            if let Need::Failed(source) = need {
                self.failure_known = true;
                return Err(Error::Peer { rank: *rank, source: source.clone() });
            }
        }
        let me = self.group.rank();
        let mut is_done = true;
        for (rank, need) in Rank::all(needs.len()).zip(needs) {
            let Need::Slice(slice) = need else { continue };
            is_done = false;
            match (&mut target, self.checkpoint) {
                (Some((target, at)), Some(checkpoint)) if rank == me => {
                    let read = slice.read_into(checkpoint, slice.rows.clone(), target, *at);
                    self.unread = self.unread.take().or(read.err());
                }
                (Some((target, at)), None) if rank == me => self.receive(&slice, target, *at)?,
                (_, Some(checkpoint)) => self.send(&slice, checkpoint, rank)?,
                _ => {}
            }
        }
        Ok(is_done)
    }

    /// Sends a slice in messages, which limits the memory that it takes. The receiver expects all of the data: if reading fails,
    /// the root sends anyway, and reports the error in the next round.
    fn send(&mut self, slice: &Slice, checkpoint: &Checkpoint, to: Rank) -> Result<()> {
        for rows in slice.messages() {
            let mut block = Tensor::zeros(&[rows.len(), slice.columns.len()], slice.dtype)?;
            if self.unread.is_none() {
                self.unread = slice.read_into(checkpoint, rows, &mut block, 0).err();
            }
            if self.group.device().is_none() {
                self.group.send(&block, to)?;
            } else {
                with_elements!(block.host()?, values => {
                    let placed = self.group.upload(values)?;
                    self.group.send(&placed, to)?;
                });
            }
        }
        Ok(())
    }

    fn receive(&mut self, slice: &Slice, target: &mut Tensor, at: usize) -> Result<()> {
        for rows in slice.messages() {
            let there = at + rows.start - slice.rows.start;
            self.group.recv(&mut target.rows_mut(there..there + rows.len()), self.root)?;
        }
        Ok(())
    }
}

impl WeightSource for RootSource<'_> {
    fn fill(&mut self, tensor: &TensorSlice<'_>, target: &mut Tensor, at: usize) -> Result<()> {
        // Before the others hear of it: a slice that does not fit is this rank's own error.
        tensor.check(target, at)?;
        let TensorSlice { name, shape, rows, columns } = tensor.clone();
        let (name, shape) = (name.into(), shape.into());
        let need = Need::Slice(Slice { name, shape, rows, columns, dtype: target.dtype() });
        self.round(&need, Some((target, at)))?;
        self.unread.take().map_or(Ok(()), Err)
    }
}

/// Loads layers: a source of weights, with this rank and the world size.
pub struct Loader<'a> {
    source: &'a mut dyn WeightSource,
    compute: Option<&'a dyn Compute>,
    shard: Shard,
    stage: Stage,
    weights: DType,
    leaves: usize,
    /// If set, counts the bytes of the tensors instead of allocating them.
    counted: Option<&'a Cell<u64>>,
}

/// The largest number of parts of a sum with invariant numerics, and so of ranks, unless a loader has another.
pub(crate) const LEAVES: usize = 8;

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .finish_non_exhaustive()
    }
}

impl<'a> Loader<'a> {
    /// Creates a loader for one rank of `world_size`, which loads matrices in the type `weights` into host memory.
    ///
    /// # Errors
    /// Returns [`ShardError::NoRank`](crate::shard::ShardError::NoRank) if there is no such rank.
    pub fn new(
        source: &'a mut dyn WeightSource,
        rank: usize,
        world_size: usize,
        weights: DType,
    ) -> Result<Self> {
        let (shard, compute, stage, counted) = (Shard::new(rank, world_size)?, None, Stage::default(), None);
        Ok(Self { source, compute, shard, stage, weights, leaves: LEAVES, counted })
    }

    /// Returns the loader with the memory of `compute` as its target.
    #[must_use]
    pub fn on(self, compute: &'a dyn Compute) -> Self {
        Self { compute: Some(compute), ..self }
    }

    /// Returns the loader for one stage of a model.
    #[must_use]
    pub fn at_stage(self, stage: Stage) -> Self {
        Self { stage, ..self }
    }

    /// Returns the loader with another number of equal parts in which row-parallel layers with invariant numerics add their inputs as
    /// a [tree](crate::shard::split_leaves); the default is 8. It must not depend on the world size.
    #[must_use]
    pub(crate) fn with_leaves(self, leaves: usize) -> Self {
        Self { leaves, ..self }
    }

    /// Returns the loader that adds the bytes of each tensor to `bytes`, and leaves the tensors empty.
    #[must_use]
    pub(crate) fn counting(self, bytes: &'a Cell<u64>) -> Self {
        Self { counted: Some(bytes), ..self }
    }

    /// Returns a loader that borrows this one, for a model that computes on `compute` with activations of this type.
    pub(crate) fn reborrow<'b>(&'b mut self, compute: &'b dyn Compute, activations: DType) -> Loader<'b> {
        let weights = compute.weight_dtype(self.weights, activations);
        Loader {
            source: &mut *self.source,
            compute: Some(compute),
            shard: self.shard,
            stage: self.stage,
            weights,
            leaves: self.leaves,
            counted: self.counted,
        }
    }

    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        if let Some(counted) = self.counted {
            let bytes = (element_count(shape, dtype)? * dtype.size()) as u64;
            let all = counted.get().checked_add(bytes);
            counted.set(all.ok_or_else(|| Error::input("a model of more bytes than can be counted"))?);
            return Tensor::zeros(&[0, 0], dtype);
        }
        match self.compute {
            Some(compute) => compute.zeros(shape, dtype),
            None => Tensor::zeros(shape, dtype),
        }
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.shard.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.shard.world_size()
    }

    /// Returns the shard that layers hold.
    pub(crate) fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns the numerics of the arithmetic that layers will use.
    pub fn numerics(&self) -> Numerics {
        self.compute.map_or(Numerics::Fast, Compute::numerics)
    }

    /// Returns the number of parts of the sums of invariant numerics.
    pub(crate) fn leaves(&self) -> usize {
        self.leaves
    }

    /// Returns the stage that is loaded.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Loads this rank's slices of several matrices, concatenated by rows.
    ///
    /// # Errors
    /// Returns the error of the source.
    pub fn matrix(&mut self, tensors: &[TensorSlice<'_>]) -> Result<Tensor> {
        let columns = tensors.first().map_or(0, |tensor| tensor.columns.len());
        let rows = rows_of(tensors)?;
        let mut target = self.zeros(&[rows, columns], self.weights)?;
        self.fill(tensors, &mut target)?;
        Ok(target)
    }

    /// Loads this rank's slices of several vectors, concatenated. Vectors are few and small, and stored in `f32`.
    ///
    /// # Errors
    /// Returns the error of the source.
    pub fn vector(&mut self, tensors: &[TensorSlice<'_>]) -> Result<Tensor> {
        let length = rows_of(tensors)?;
        let mut target = self.zeros(&[length], DType::F32)?;
        self.fill(tensors, &mut target)?;
        Ok(target)
    }

    /// Loads this rank's rows of a matrix, padded with rows of zeros to `rows`.
    ///
    /// # Errors
    /// Returns the error of the source.
    pub fn padded(&mut self, tensor: &TensorSlice<'_>, rows: usize) -> Result<Tensor> {
        let mut target = self.zeros(&[rows, tensor.columns.len()], self.weights)?;
        self.source.fill(tensor, &mut target, 0)?;
        Ok(target)
    }

    fn fill(&mut self, tensors: &[TensorSlice<'_>], target: &mut Tensor) -> Result<()> {
        let mut at = 0;
        for tensor in tensors {
            self.source.fill(tensor, target, at)?;
            at += tensor.rows.len();
        }
        Ok(())
    }
}

/// Returns the number of rows of several slices together.
fn rows_of(tensors: &[TensorSlice<'_>]) -> Result<usize> {
    let all = tensors.iter().try_fold(0usize, |rows, tensor| rows.checked_add(tensor.rows.len()));
    all.ok_or_else(|| Error::input("slices of more rows than can be counted"))
}
