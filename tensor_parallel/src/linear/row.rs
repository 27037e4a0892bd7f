//! A linear layer that holds a shard of its input features.

use std::ops::Range;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::DType;

use crate::checkpoint::{Loader, TensorSlice};
use crate::communicator::{Communicator, Shard};
use crate::compute::Compute;
use crate::error::{ConfigurationError, Error, Result};
use crate::norm::RmsNorm;
use crate::shard;
use crate::tensor::Tensor;

/// The minimum number of bytes of a rank's terms for which the ranks divide the addition. Shorter ones are gathered and added by every
/// rank, which saves a call.
const SHARED_TERMS: usize = 64 << 10;

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
///
/// With [invariant](Compute::numerics) numerics, a rank adds its parts of the inputs as a subtree, in `f32`, and these sums are added as
/// the rest of the tree: by the group's kernel with the norm if it has one; otherwise each rank adds a share of the elements, or every
/// rank adds all of them if they are few. So the result has the same bits with every world size (the binary tree of TBIK, arXiv
/// 2511.17826).
#[derive(Debug)]
pub struct RowParallelLinear {
    weight: Tensor,
    /// Number of parts of this rank's inputs, if numerics are invariant: the weight has the rows for each part in turn.
    leaves: Option<usize>,
    bias: Option<Tensor>,
    inputs: Range<usize>,
    shard: Shard,
    options: RowOptions,
}

impl RowParallelLinear {
    /// Loads `{name}.weight` `[outputs, inputs]`, and `{name}.bias` if it has one.
    ///
    /// # Errors
    /// Returns an error if the world size does not divide the inputs or, with invariant numerics, the parts, if there is a bias
    /// without a sum, because every rank would add the bias, or if the source fails.
    pub fn load(
        loader: &mut Loader<'_>,
        name: &str,
        (outputs, inputs): (usize, usize),
        options: RowOptions,
    ) -> Result<Self> {
        if options.bias && !options.reduce_results {
            return Err(ConfigurationError::UnreducedBias { layer: name.into() }.into());
        }
        let (what, world_size) = (format!("inputs of `{name}`"), loader.world_size());
        let (matrix, shape) = (format!("{name}.weight"), [outputs, inputs]);
        let mine = shard::split_evenly(&what, inputs, world_size)?[loader.rank()].clone();
        let leaves = match loader.numerics() {
            Numerics::Fast => None,
            Numerics::Invariant => Some(shard::split_leaves(loader.leaves(), world_size)?),
        };
        let count = leaves.unwrap_or(1);
        let all = shard::split_evenly(&what, inputs, count * world_size)?;
        let whole = TensorSlice::whole(&matrix, &shape);
        let parts = all[loader.rank() * count..][..count].iter();
        let parts: Vec<_> =
            parts.map(|columns| TensorSlice { columns: columns.clone(), ..whole.clone() }).collect();
        let weight = loader.matrix(&parts)?;
        let mut bias = None;
        if options.bias {
            bias = Some(loader.vector(&[TensorSlice::whole(&format!("{name}.bias"), &[outputs])])?);
        }
        Ok(Self { weight, leaves, bias, inputs: mine, shard: loader.shard(), options })
    }

    /// Returns the sum over all ranks plus the bias. Without `reduce_results`, returns this rank's term of the sum. Takes one all-reduce;
    /// with invariant numerics one all-gather, before it an all-to-all if the terms are long and the ranks divide the columns.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, the group fails, or is not that of loading.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute, group: &mut dyn Communicator) -> Result<Tensor> {
        let mut y = self.sum(x, compute, group)?;
        if let Some(bias) = &self.bias {
            compute.add(&mut y, bias)?;
        }
        Ok(y)
    }

    /// Adds the result of [`forward`](Self::forward) to `residual`, and returns the normalised rows of that sum. If the group
    /// [has](ryzanstein_process_group::ProcessGroup::fuses_add_norm) one kernel for all of it, the squares of a row may be added in
    /// another order, unless numerics are invariant.
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
        let (rows, columns) = (x.rows(), self.weight.rows() / self.leaves.unwrap_or(1));
        let is_sum = self.options.reduce_results && self.bias.is_none();
        if is_sum
            && residual.dtype() == x.dtype()
            && [residual.rows(), residual.columns(), norm.weight().count()] == [rows, columns, columns]
            && let Some(group) = group.process_group()
            && group.fuses_add_norm(self.dtype_of_terms(x), rows, columns)
        {
            self.shard.check(group)?;
            let term = self.term(x, self.dtype_of_terms(x), compute)?;
            let mut normed = compute.scratch(residual.shape(), residual.dtype())?;
            group.all_reduce_add_norm(&term, residual, (norm.weight(), norm.epsilon()), &mut normed)?;
            return Ok(normed);
        }
        let y = self.forward(x, compute, group)?;
        compute.add_norm(residual, &y, norm.weight(), norm.epsilon())
    }

    /// Returns the sum over all ranks, or without `reduce_results` this rank's term of it.
    fn sum(&self, x: &Tensor, compute: &dyn Compute, group: &mut dyn Communicator) -> Result<Tensor> {
        let (ranks, is_invariant) = (self.shard.world_size(), self.leaves.is_some());
        if self.options.reduce_results {
            self.shard.check(group)?;
        }
        if !self.options.reduce_results || (is_invariant && ranks == 1) {
            return self.term(x, x.dtype(), compute);
        }
        let mut mine = self.term(x, self.dtype_of_terms(x), compute)?;
        if !is_invariant {
            group.all_reduce_sum(&mut mine)?;
            return Ok(mine);
        }
        let (rows, columns) = (mine.rows(), mine.columns());
        let is_shared = mine.bytes() >= SHARED_TERMS && columns.is_multiple_of(ranks);
        if is_shared && let Some(group) = group.process_group() {
            // A share is consecutive elements, whichever rows they are of.
            let mut terms = compute.scratch(&[ranks, rows, columns / ranks], DType::F32)?;
            group.all_to_all_into(&mine, &mut terms)?;
            let share = compute.sum_of_leaves(&terms, x.dtype())?;
            let mut sum = compute.scratch(&[rows, columns], x.dtype())?;
            group.all_gather_into(&share, &mut sum)?;
            return Ok(sum);
        }
        let mut terms = compute.scratch(&[ranks, rows, columns], DType::F32)?;
        group.all_gather(&mine, &mut terms)?;
        compute.sum_of_leaves(&terms, x.dtype())
    }

    /// Returns the type in which terms of a sum are sent.
    fn dtype_of_terms(&self, x: &Tensor) -> DType {
        self.leaves.map_or(x.dtype(), |_| DType::F32)
    }

    /// Returns this rank's term of the sum, rounded to `out`; with invariant numerics it is added as a tree.
    fn term(&self, x: &Tensor, out: DType, compute: &dyn Compute) -> Result<Tensor> {
        let mut held = None;
        let x = self.input(x, compute, &mut held)?;
        match self.leaves {
            Some(leaves) => compute.linear_of_leaves(x, &self.weight, leaves, out),
            None => compute.linear(x, &self.weight, None, out),
        }
    }

    /// Returns this rank's features of `x`, which are `x` itself or copied into `held`.
    fn input<'a>(
        &self,
        x: &'a Tensor,
        compute: &dyn Compute,
        held: &'a mut Option<Tensor>,
    ) -> Result<&'a Tensor> {
        if self.options.input_is_parallel {
            return Ok(x);
        }
        if x.shape().len() != 2 {
            return Err(Error::input(format!(
                "the input of a layer is [positions, features], not {:?}",
                x.shape()
            )));
        }
        Ok(held.insert(compute.select_columns(x, self.inputs.clone())?))
    }
}
