//! `[model]`

use super::section;
use crate::{ModelDType, Temperature, TopP};
use std::path::PathBuf;

section! {
    /// The model that `ryz generate` runs, and how it samples.
    ModelConfig = "model" {
        /// The folder of the checkpoint, in Hugging Face's form.
        directory: Option<PathBuf> = "",
        /// The type of activations; unset, that in which matrices are stored, or f32 where they differ.
        dtype: Option<ModelDType> = "",
        /// The most tokens generated.
        max_new_tokens: u32 = "32",
        /// The temperature of sampling; 0 takes the likeliest token always.
        temperature: Temperature = "0",
        /// The probability mass of the likeliest tokens that is sampled from.
        top_p: TopP = "1",
        /// The seed of sampling.
        seed: u64 = "0",
        /// On a GPU: whether the pass of one token is recorded into a CUDA graph and repeated, in place of launching its
        /// every operation.
        graph: bool = "true",
    }
}
