//! Where a rank's weights come from: its own files, the files of one rank, or memory.

use std::collections::HashMap;
use std::ops::Range;

use ryzanstein_process_group::{Buffer as _, DType, ProcessGroup, Rank};

use super::Checkpoint;
use crate::compute::Compute;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Approximate size of a message of weights: large enough to be fast, small enough to need little extra memory.
const MESSAGE_BYTES: usize = 16 << 20;

/// Which slice of a tensor each rank holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Sharding {
    /// Every rank holds all of it.
    Replicated,
    /// These rows, one range for each rank.
    Rows(Vec<Range<usize>>),
    /// These columns, one range for each rank.
    Columns(Vec<Range<usize>>),
}

/// A tensor of the checkpoint, and how it is sharded.
#[derive(Clone, Debug)]
pub struct ShardedTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its whole shape.
    pub shape: &'a [usize],
    /// Which rank holds which slice.
    pub sharding: Sharding,
}

impl ShardedTensor<'_> {
    /// The rows and columns that a rank holds. A vector is one column.
    pub fn slice_of(&self, rank: usize) -> (Range<usize>, Range<usize>) {
        let rows = 0..self.shape.first().copied().unwrap_or(1);
        let columns = 0..self.shape.iter().skip(1).product();
        match &self.sharding {
            Sharding::Replicated => (rows, columns),
            Sharding::Rows(ranges) => (ranges[rank].clone(), columns),
            Sharding::Columns(ranges) => (rows, ranges[rank].clone()),
        }
    }
}

/// Fills tensors with this rank's slices of the weights. All ranks ask for the same tensors in the same order.
pub trait WeightSource {
    /// Copies this rank's slice into `target`, from its row `at` on, rounded to the target's type.
    ///
    /// # Errors
    /// When the tensor is missing or cannot be read, or its sender fails.
    fn fill(&mut self, tensor: &ShardedTensor<'_>, target: &mut Tensor, at: usize) -> Result<()>;
}

/// Weights from files that this rank can read.
#[derive(Debug)]
pub struct LocalSource<'a> {
    /// The files.
    pub checkpoint: &'a Checkpoint,
    /// The rank whose slices to read.
    pub rank: usize,
}

impl WeightSource for LocalSource<'_> {
    fn fill(&mut self, tensor: &ShardedTensor<'_>, target: &mut Tensor, at: usize) -> Result<()> {
        let (rows, columns) = tensor.slice_of(self.rank);
        self.checkpoint.read_into(tensor.name, tensor.shape, rows, columns, target, at)
    }
}

/// Whole tensors in memory, by name.
#[derive(Debug)]
pub struct MemorySource<'a> {
    /// The tensors.
    pub tensors: &'a HashMap<String, Tensor>,
    /// The rank whose slices to copy.
    pub rank: usize,
}

impl WeightSource for MemorySource<'_> {
    fn fill(&mut self, tensor: &ShardedTensor<'_>, target: &mut Tensor, at: usize) -> Result<()> {
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
        let (rows, columns) = tensor.slice_of(self.rank);
        let values = whole.values()?;
        let width = whole.columns();
        let values = rows.clone().flat_map(|r| &values[r * width..][columns.clone()]).copied().collect();
        let block = Tensor::new(&[rows.len(), columns.len()], values, target.dtype())?;
        let bytes = block.view().host()?;
        let width = columns.len() * block.dtype().size();
        target.fill_rows(at, rows.len(), &|part, to| {
            to.copy_from_slice(&bytes[part.start * width..part.end * width]);
        })
    }
}

/// Weights that one rank reads and sends to the others. Each rank gets its own slices only; replicated tensors are broadcast.
#[derive(Debug)]
pub struct RootSource<'a> {
    /// The files, on the root.
    pub checkpoint: Option<&'a Checkpoint>,
    /// The rank that has them.
    pub root: Rank,
    /// All ranks.
    pub group: &'a mut ProcessGroup,
}

impl WeightSource for RootSource<'_> {
    fn fill(&mut self, tensor: &ShardedTensor<'_>, target: &mut Tensor, at: usize) -> Result<()> {
        let me = self.group.rank();
        // The others wait for what is read. If reading fails, the root sends all the same, and returns the error after.
        let mut read = Ok(());
        if tensor.sharding == Sharding::Replicated {
            let (rows, columns) = tensor.slice_of(me.index());
            let count = rows.len();
            if let Some(checkpoint) = self.checkpoint {
                read = checkpoint.read_into(tensor.name, tensor.shape, rows, columns, target, at);
            }
            self.group.broadcast(&mut target.rows_mut(at..at + count), self.root)?;
            return read;
        }
        for peer in Rank::all(self.group.world_size()) {
            let (rows, columns) = tensor.slice_of(peer.index());
            let step = (MESSAGE_BYTES / (columns.len() * target.dtype().size()).max(1)).max(1);
            let mut block = target.like(&[0, 0])?;
            for start in rows.clone().step_by(step) {
                let piece = start..rows.end.min(start + step);
                let there = at + start - rows.start;
                if me == peer && me != self.root {
                    self.group.recv(&mut target.rows_mut(there..there + piece.len()), self.root)?;
                } else if let Some(checkpoint) = self.checkpoint {
                    if me == peer {
                        read = read.and_then(|()| {
                            checkpoint.read_into(
                                tensor.name,
                                tensor.shape,
                                piece,
                                columns.clone(),
                                target,
                                there,
                            )
                        });
                        continue;
                    }
                    if block.shape() != [piece.len(), columns.len()] {
                        block = target.like(&[piece.len(), columns.len()])?;
                    }
                    read = read.and_then(|()| {
                        checkpoint.read_into(tensor.name, tensor.shape, piece, columns.clone(), &mut block, 0)
                    });
                    self.group.send(&block, peer)?;
                }
            }
        }
        read
    }
}

/// Loads layers: a source of weights, this rank and the world size.
pub struct Loader<'a> {
    source: &'a mut dyn WeightSource,
    compute: Option<&'a dyn Compute>,
    rank: usize,
    world_size: usize,
    weights: DType,
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .finish_non_exhaustive()
    }
}

impl<'a> Loader<'a> {
    /// Loads for one rank of `world_size`, matrices in the type `weights`, into host memory.
    pub fn new(source: &'a mut dyn WeightSource, rank: usize, world_size: usize, weights: DType) -> Self {
        Self { source, compute: None, rank, world_size, weights }
    }

    /// The same, but loads into the memory of `compute`.
    #[must_use]
    pub fn on(self, compute: &'a dyn Compute) -> Self {
        Self { compute: Some(compute), ..self }
    }

    /// A loader that borrows this one, for a model that computes on `compute` with activations of this type.
    pub(crate) fn reborrow<'b>(&'b mut self, compute: &'b dyn Compute, activations: DType) -> Loader<'b> {
        let weights = compute.weight_dtype(self.weights, activations);
        Loader {
            source: &mut *self.source,
            compute: Some(compute),
            rank: self.rank,
            world_size: self.world_size,
            weights,
        }
    }

    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        match self.compute {
            Some(compute) => compute.zeros(shape, dtype),
            None => Tensor::zeros(shape, dtype),
        }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// This rank's slices of some matrices, one below the other.
    ///
    /// # Errors
    /// What the source reports.
    pub fn matrix(&mut self, tensors: &[ShardedTensor<'_>]) -> Result<Tensor> {
        let slices: Vec<_> = tensors.iter().map(|p| p.slice_of(self.rank)).collect();
        let columns = slices.first().map_or(0, |(_, c)| c.len());
        let rows = slices.iter().map(|(r, _)| r.len()).sum();
        let mut target = self.zeros(&[rows, columns], self.weights)?;
        self.fill(tensors, &mut target)?;
        Ok(target)
    }

    /// This rank's slices of some vectors, one behind the other. Vectors are few and small, and held in `f32`.
    ///
    /// # Errors
    /// What the source reports.
    pub fn vector(&mut self, tensors: &[ShardedTensor<'_>]) -> Result<Tensor> {
        let length = tensors.iter().map(|p| p.slice_of(self.rank).0.len()).sum();
        let mut target = self.zeros(&[length], DType::F32)?;
        self.fill(tensors, &mut target)?;
        Ok(target)
    }

    /// This rank's rows of a matrix, followed by rows of zeros up to `rows`.
    ///
    /// # Errors
    /// What the source reports.
    pub fn padded(&mut self, tensor: &ShardedTensor<'_>, rows: usize) -> Result<Tensor> {
        let mut target = self.zeros(&[rows, tensor.slice_of(self.rank).1.len()], self.weights)?;
        self.source.fill(tensor, &mut target, 0)?;
        Ok(target)
    }

    fn fill(&mut self, tensors: &[ShardedTensor<'_>], target: &mut Tensor) -> Result<()> {
        let mut at = 0;
        for tensor in tensors {
            self.source.fill(tensor, target, at)?;
            at += tensor.slice_of(self.rank).0.len();
        }
        Ok(())
    }
}
