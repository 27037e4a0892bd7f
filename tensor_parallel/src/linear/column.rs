//! A linear layer that holds a shard of its output features.

use super::{MergedColumnParallelLinear, gather_columns};
use crate::checkpoint::Loader;
use crate::communicator::{Communicator, Shard};
use crate::compute::Compute;
use crate::error::Result;
use crate::tensor::Tensor;

/// Options of a column-parallel layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ColumnOptions {
    /// True if the layer has a bias.
    pub bias: bool,
    /// True if `forward` returns the complete result on every rank, by one all-gather. Otherwise it returns this rank's features.
    pub gather_output: bool,
}

/// `y = x · Wᵀ + b` with the output features sharded. The input is complete on every rank.
#[derive(Debug)]
pub struct ColumnParallelLinear {
    inner: MergedColumnParallelLinear,
    shard: Shard,
    features: usize,
    gather_output: bool,
}

impl ColumnParallelLinear {
    /// Loads `{name}.weight` `[outputs, inputs]`, and `{name}.bias` if it has one.
    ///
    /// # Errors
    /// Returns an error if the world size does not divide the outputs, or the source fails.
    pub fn load(
        loader: &mut Loader<'_>,
        name: &str,
        (outputs, inputs): (usize, usize),
        options: ColumnOptions,
    ) -> Result<Self> {
        let inner = MergedColumnParallelLinear::load(loader, &[(name, outputs)], inputs, options.bias)?;
        Ok(Self { inner, shard: loader.shard(), features: outputs, gather_output: options.gather_output })
    }

    /// Returns this rank's output features, or all of them with `gather_output`.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, the group fails, or is not that of loading.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute, group: &mut dyn Communicator) -> Result<Tensor> {
        let local = self.inner.forward(x, compute)?;
        if self.gather_output {
            return gather_columns(&local, self.features, compute, (self.shard, group));
        }
        Ok(local)
    }
}
