//! A linear layer that holds a shard of its input features.

use std::ops::Range;

use crate::checkpoint::{Loader, ShardedTensor, Sharding};
use crate::communicator::Communicator;
use crate::compute::Compute;
use crate::error::{ConfigurationError, Result};
use crate::norm::RmsNorm;
use crate::shard;
use crate::tensor::Tensor;

/// Options of a row-parallel layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowOptions {
    /// True if the layer has a bias.
    pub bias: bool,
    /// True if the input of a rank is only its own features, as a column-parallel layer returns them. Otherwise it is complete.
    pub input_is_parallel: bool,
    /// True if `forward` sums the results of all ranks. Otherwise it returns this rank's term of the sum.
    pub reduce_results: bool,
}

impl Default for RowOptions {
    fn default() -> Self {
        Self { bias: false, input_is_parallel: true, reduce_results: true }
    }
}

/// `y = x · Wᵀ + b` with the input features sharded: every rank computes one term of the sum.
#[derive(Debug)]
pub struct RowParallelLinear {
    weight: Tensor,
    bias: Option<Tensor>,
    inputs: Range<usize>,
    options: RowOptions,
}

impl RowParallelLinear {
    /// Loads `{name}.weight` `[outputs, inputs]`, and `{name}.bias` if it has one.
    ///
    /// # Errors
    /// Returns an error if the world size does not divide the inputs, if there is a bias without a sum, because every rank would
    /// add the bias, or if the source fails.
    pub fn load(
        loader: &mut Loader<'_>,
        name: &str,
        (outputs, inputs): (usize, usize),
        options: RowOptions,
    ) -> Result<Self> {
        if options.bias && !options.reduce_results {
            return Err(ConfigurationError::UnreducedBias { layer: name.into() }.into());
        }
        let ranges = shard::split_evenly(&format!("inputs of `{name}`"), inputs, loader.world_size())?;
        let mine = ranges[loader.rank()].clone();
        let weight = loader.matrix(&[ShardedTensor {
            name: &format!("{name}.weight"),
            shape: &[outputs, inputs],
            sharding: Sharding::Columns(ranges),
        }])?;
        let mut bias = None;
        if options.bias {
            let part = ShardedTensor {
                name: &format!("{name}.bias"),
                shape: &[outputs],
                sharding: Sharding::Replicated,
            };
            bias = Some(loader.vector(&[part])?);
        }
        Ok(Self { weight, bias, inputs: mine, options })
    }

    /// Returns the sum over all ranks, by one all-reduce, plus the bias. Without `reduce_results`, returns this rank's term of
    /// the sum.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit or the group fails.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute, group: &mut dyn Communicator) -> Result<Tensor> {
        let mut y = self.term(x, compute)?;
        if self.options.reduce_results {
            group.all_reduce_sum(&mut y)?;
        }
        if let Some(bias) = &self.bias {
            compute.add(&mut y, bias)?;
        }
        Ok(y)
    }

    /// Adds the result of [`forward`](Self::forward) to `residual`, and returns the normalised rows of that sum. If the group
    /// [has](ryzanstein_process_group::ProcessGroup::fuses_add_norm) one kernel for all of it, the squares of a row are added in
    /// another order.
    ///
    /// # Errors
    /// Returns the errors of [`forward`](Self::forward).
    pub fn forward_add_norm(
        &self,
        x: &Tensor,
        (residual, norm): (&mut Tensor, &RmsNorm),
        compute: &dyn Compute,
        group: &mut dyn Communicator,
    ) -> Result<Tensor> {
        let (rows, columns) = (x.rows(), self.weight.rows());
        let is_sum = self.options.reduce_results && self.bias.is_none();
        let fits = residual.dtype() == x.dtype() && [residual.rows(), residual.columns()] == [rows, columns];
        if is_sum
            && fits
            && norm.weight().count() == columns
            && let Some(group) = group.process_group()
            && group.fuses_add_norm(x.dtype(), rows, columns)
        {
            let mut y = self.term(x, compute)?;
            group.all_reduce_add_norm(&mut y, residual, norm.weight(), norm.epsilon())?;
            return Ok(y);
        }
        let y = self.forward(x, compute, group)?;
        compute.add_norm(residual, &y, norm.weight(), norm.epsilon())
    }

    /// Returns this rank's term of the sum.
    fn term(&self, x: &Tensor, compute: &dyn Compute) -> Result<Tensor> {
        if self.options.input_is_parallel {
            return compute.linear(x, &self.weight, None, x.dtype());
        }
        compute.linear(&compute.slice_columns(x, self.inputs.clone())?, &self.weight, None, x.dtype())
    }
}
