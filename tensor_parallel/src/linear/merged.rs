//! Several column-parallel layers of one input, computed as one.

use std::ops::Range;

use crate::checkpoint::{Loader, TensorSlice};
use crate::compute::Compute;
use crate::error::Result;
use crate::shard::{self, ShardError};
use crate::tensor::Tensor;

/// Column-parallel layers of one input in one matrix, such as gate and up of an MLP. Each is sharded separately: the result of a
/// rank is its shard of the first, then its shard of the second, and so on.
#[derive(Debug)]
pub struct MergedColumnParallelLinear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl MergedColumnParallelLinear {
    /// Loads `{name}.weight` `[outputs, inputs]` for every `(name, outputs)`, and `{name}.bias` if they have one.
    ///
    /// # Errors
    /// Returns an error if the world size does not divide the outputs of a layer, or the source fails.
    pub fn load(loader: &mut Loader<'_>, parts: &[(&str, usize)], inputs: usize, bias: bool) -> Result<Self> {
        let (rank, world_size) = (loader.rank(), loader.world_size());
        let mine = |(name, outputs): &(&str, usize)| {
            let all = shard::split_evenly(&format!("outputs of `{name}`"), *outputs, world_size)?;
            Ok::<_, ShardError>(all[rank].clone())
        };
        let rows = parts.iter().map(mine).collect::<Result<Vec<_>, _>>()?;
        Self::load_rows(loader, parts, &rows, inputs, bias)
    }

    /// Loads these rows of each layer.
    pub(super) fn load_rows(
        loader: &mut Loader<'_>,
        parts: &[(&str, usize)],
        rows: &[Range<usize>],
        inputs: usize,
        bias: bool,
    ) -> Result<Self> {
        let names = |suffix| parts.iter().map(|(name, _)| format!("{name}.{suffix}")).collect::<Vec<_>>();
        let shapes: Vec<_> = parts.iter().map(|(_, outputs)| [*outputs, inputs]).collect();
        let weights = names("weight");
        let weight = loader.matrix(&join(&weights, shapes.iter().map(<[usize; 2]>::as_slice), rows))?;
        let mut biases = None;
        if bias {
            biases = Some(loader.vector(&join(&names("bias"), shapes.iter().map(|s| &s[..1]), rows))?);
        }
        Ok(Self { weight, bias: biases })
    }

    /// Returns this rank's output features of every layer. Takes no communication.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute) -> Result<Tensor> {
        compute.linear(x, &self.weight, self.bias.as_ref(), x.dtype())
    }

    /// Returns `silu(gate) × up` of this rank's output features, where the first of two layers of one width gives the gates.
    pub(crate) fn forward_gated(&self, x: &Tensor, compute: &dyn Compute) -> Result<Tensor> {
        compute.gated_linear(x, &self.weight, self.bias.as_ref())
    }
}

fn join<'a>(
    names: &'a [String],
    shapes: impl Iterator<Item = &'a [usize]>,
    rows: &[Range<usize>],
) -> Vec<TensorSlice<'a>> {
    let slice = |((name, shape), rows): ((&'a String, _), &Range<usize>)| TensorSlice {
        rows: rows.clone(),
        ..TensorSlice::whole(name, shape)
    };
    names.iter().zip(shapes).zip(rows).map(slice).collect()
}
