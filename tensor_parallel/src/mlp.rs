//! The SwiGLU feed-forward block.

use crate::checkpoint::Loader;
use crate::communicator::Communicator;
use crate::compute::Compute;
use crate::error::Result;
use crate::linear::{MergedColumnParallelLinear, RowOptions, RowParallelLinear};
use crate::norm::RmsNorm;
use crate::tensor::Tensor;

/// `down(silu(gate(x)) × up(x))` with the intermediate features sharded over the ranks.
#[derive(Debug)]
pub struct ParallelMlp {
    gate_up: MergedColumnParallelLinear,
    down: RowParallelLinear,
}

impl ParallelMlp {
    /// Loads `{prefix}.gate_proj`, `up_proj` and `down_proj`.
    ///
    /// # Errors
    /// Returns an error if the world size does not divide the intermediate features, or the source fails.
    pub fn load(
        loader: &mut Loader<'_>,
        prefix: &str,
        hidden: usize,
        intermediate: usize,
        bias: bool,
    ) -> Result<Self> {
        let (gate, up) = (format!("{prefix}.gate_proj"), format!("{prefix}.up_proj"));
        let parts = [(gate.as_str(), intermediate), (up.as_str(), intermediate)];
        Ok(Self {
            gate_up: MergedColumnParallelLinear::load(loader, &parts, hidden, bias)?,
            down: RowParallelLinear::load(
                loader,
                &format!("{prefix}.down_proj"),
                (hidden, intermediate),
                RowOptions { bias, ..RowOptions::default() },
            )?,
        })
    }

    /// Computes the block. Takes one all-reduce.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit or the group fails.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute, group: &mut dyn Communicator) -> Result<Tensor> {
        self.down.forward(&self.inner(x, compute)?, compute, group)
    }

    /// Adds the result of [`forward`](Self::forward) to a residual and normalises the sum, as
    /// [`RowParallelLinear::forward_add_norm`] does.
    ///
    /// # Errors
    /// Returns the errors of [`forward`](Self::forward).
    pub fn forward_add_norm(
        &self,
        x: &Tensor,
        to: (&mut Tensor, &RmsNorm),
        compute: &dyn Compute,
        group: &mut dyn Communicator,
    ) -> Result<Tensor> {
        self.down.forward_add_norm(&self.inner(x, compute)?, to, compute, group)
    }

    /// Returns the input of the last projection.
    fn inner(&self, x: &Tensor, compute: &dyn Compute) -> Result<Tensor> {
        self.gate_up.forward_gated(x, compute)
    }
}
