//! A linear layer that holds a shard of its output features.

use super::gather_columns;
use crate::checkpoint::{Loader, ShardedTensor, Sharding};
use crate::communicator::Communicator;
use crate::compute::Compute;
use crate::error::Result;
use crate::shard;
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
    weight: Tensor,
    bias: Option<Tensor>,
    features: usize,
    options: ColumnOptions,
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
        let sharding = Sharding::Rows(shard::split_evenly(
            &format!("outputs of `{name}`"),
            outputs,
            loader.world_size(),
        )?);
        let weight = loader.matrix(&[ShardedTensor {
            name: &format!("{name}.weight"),
            shape: &[outputs, inputs],
            sharding: sharding.clone(),
        }])?;
        let mut bias = None;
        if options.bias {
            bias = Some(loader.vector(&[ShardedTensor {
                name: &format!("{name}.bias"),
                shape: &[outputs],
                sharding,
            }])?);
        }
        Ok(Self { weight, bias, features: outputs, options })
    }

    /// Returns this rank's output features, or all of them with `gather_output`.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit or the group fails.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute, group: &mut dyn Communicator) -> Result<Tensor> {
        let local = compute.linear(x, &self.weight, self.bias.as_ref(), x.dtype())?;
        if self.options.gather_output {
            return gather_columns(&local, self.features, compute, group);
        }
        Ok(local)
    }
}
