//! `[model]`

use super::section;
use crate::{InstructionSet, ModelDType, Temperature, TopP};
use std::path::PathBuf;

section! {
    /// The model that `ryz generate` runs, and how it samples.
    ModelConfig = "model" {
        /// The folder of the checkpoint, in Hugging Face format.
        directory: Option<PathBuf> = "",
        /// The type of activations; unset, that of the stored matrices, or f32 where they differ.
        dtype: Option<ModelDType> = "",
        /// The maximum number of generated tokens.
        max_new_tokens: u32 = "32",
        /// The sampling temperature; 0 always takes the likeliest token.
        temperature: Temperature = "0",
        /// Nucleus sampling: sample from the likeliest tokens that together have this probability.
        top_p: TopP = "1",
        /// Sample from the K likeliest tokens only; 0 means all.
        top_k: u32 = "0",
        /// The seed for sampling.
        seed: u64 = "0",
        /// On CPUs: the instructions that multiply matrices, once for a process; unset, the fastest that the processor has.
        /// All ranks of a model must use the same.
        instruction_set: Option<InstructionSet> = "",
        /// On a GPU: whether the pass of one token is captured in a CUDA graph and replayed, instead of launching every
        /// operation.
        graph: bool = "true",
    }
}
