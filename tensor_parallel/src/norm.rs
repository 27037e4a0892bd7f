//! Normalisation, replicated on every rank.

use crate::checkpoint::{Loader, TensorSlice};
use crate::compute::Compute;
use crate::error::Result;
use crate::tensor::Tensor;

/// Root-mean-square normalisation over the features. It takes no communication.
#[derive(Debug)]
pub struct RmsNorm {
    weight: Tensor,
    epsilon: f32,
}

impl RmsNorm {
    /// Loads `{name}.weight` of `features` elements.
    ///
    /// # Errors
    /// Returns an error if the source fails.
    pub fn load(loader: &mut Loader<'_>, name: &str, features: usize, epsilon: f32) -> Result<Self> {
        let weight = loader.vector(&[TensorSlice::whole(&format!("{name}.weight"), &[features])])?;
        Ok(Self { weight, epsilon })
    }

    /// Returns the weight, one number for each feature, in f32.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the constant that is added to the mean of the squares.
    pub fn epsilon(&self) -> f32 {
        self.epsilon
    }

    /// Normalises each row.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute) -> Result<Tensor> {
        compute.rms_norm(x, &self.weight, self.epsilon)
    }
}
