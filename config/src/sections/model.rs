//! `[model]`

use super::section;
use crate::{InstructionSet, ModelDType, Numerics, Temperature, TopP};
use std::path::PathBuf;

section! {
    /// The model that `ryz generate` runs, and its sampling.
    ModelConfig = "model" {
        /// The folder of the checkpoint, in Hugging Face format.
        directory: Option<PathBuf> = "",
        /// The type of activations; unset, that of the stored matrices, or f32 if they differ.
        dtype: Option<ModelDType> = "",
        /// The maximum number of generated tokens.
        max_new_tokens: u32 = "32",
        /// The sampling temperature; 0 always selects the most likely token.
        temperature: Temperature = "0",
        /// Nucleus sampling: sample from the most likely tokens that together have this probability.
        top_p: TopP = "1",
        /// Sample from the K most likely tokens only; 0 means all.
        top_k: u32 = "0",
        /// The seed for sampling.
        seed: u64 = "0",
        /// On CPUs: the instruction set of matrix products, chosen once per process; unset, the fastest that the processor has.
        /// All ranks of a model must use the same.
        instruction_set: Option<InstructionSet> = "",
        /// `invariant`: the same bits with every legal number of ranks, batch and chunking, on CPUs. All ranks of a model must use the same.
        numerics: Numerics = "fast",
        /// On a GPU: capture the pass of one token in a CUDA graph and replay it, instead of launching every operation.
        graph: bool = "true",
    }
}
