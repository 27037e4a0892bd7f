//! Several column-parallel layers of one input, computed as one.

use crate::checkpoint::{Cut, Loader, Part};
use crate::compute::Compute;
use crate::error::Result;
use crate::shard;
use crate::tensor::Tensor;

/// Column-parallel layers of one input in one matrix: gate and up of an MLP. Each part is cut on its own, so a rank's
/// result holds its share of the first part, then its share of the second, and so on.
#[derive(Debug)]
pub struct MergedColumnParallelLinear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl MergedColumnParallelLinear {
    /// Loads `{name}.weight` `[outputs, inputs]` for every `(name, outputs)`, and `{name}.bias` if they have one.
    ///
    /// # Errors
    /// When the world size does not divide the outputs of a part, or the source fails.
    pub fn load(loader: &mut Loader<'_>, parts: &[(&str, usize)], inputs: usize, bias: bool) -> Result<Self> {
        let world_size = loader.world_size();
        let cuts = parts
            .iter()
            .map(|(name, outputs)| {
                shard::even(&format!("outputs of `{name}`"), *outputs, world_size).map(Cut::Rows)
            })
            .collect::<Result<Vec<_>>>()?;
        Self::load_cut(loader, parts, &cuts, inputs, bias)
    }

    pub(super) fn load_cut(
        loader: &mut Loader<'_>,
        parts: &[(&str, usize)],
        cuts: &[Cut],
        inputs: usize,
        bias: bool,
    ) -> Result<Self> {
        let names = |suffix| parts.iter().map(|(name, _)| format!("{name}.{suffix}")).collect::<Vec<_>>();
        let shapes: Vec<_> = parts.iter().map(|(_, outputs)| [*outputs, inputs]).collect();
        let weights = names("weight");
        let weight = loader.matrix(&join(&weights, shapes.iter().map(<[usize; 2]>::as_slice), cuts))?;
        let mut biases = None;
        if bias {
            biases = Some(loader.vector(&join(&names("bias"), shapes.iter().map(|s| &s[..1]), cuts))?);
        }
        Ok(Self { weight, bias: biases })
    }

    /// This rank's output features of every part. No communication.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute) -> Result<Tensor> {
        compute.linear(x, &self.weight, self.bias.as_ref(), x.dtype())
    }
}

fn join<'a>(names: &'a [String], shapes: impl Iterator<Item = &'a [usize]>, cuts: &[Cut]) -> Vec<Part<'a>> {
    let parts = names.iter().zip(shapes).zip(cuts);
    parts.map(|((name, shape), cut)| Part { name, shape, cut: cut.clone() }).collect()
}
