//! Tensor parallelism: weights sharded over ranks, and layers that compute on a shard and call the process group.
//!
//! Start at [`Llama::load`], which reads a Hugging Face folder of one of the [`ARCHITECTURES`](model::ARCHITECTURES): [`Llama`]
//! implements all of them.
//!
//! A column-parallel layer shards the output features, the rows of its weight. A row-parallel layer shards the input features, the
//! columns of its weight, and sums the results of all ranks. Layers borrow the
//! [`ProcessGroup`](ryzanstein_process_group::ProcessGroup), or another [`Communicator`], during a call, so the order of collectives is
//! the order of the code.
//!
//! ```no_run
//! use ryzanstein_process_group::ProcessGroup;
//! use ryzanstein_tensor_parallel::{GenerateOptions, Llama};
//!
//! # fn main() -> ryzanstein_tensor_parallel::Result<()> {
//! let mut group = ProcessGroup::loopback(1).remove(0);
//! // `None`: activations have the element type of the weights.
//! let model = Llama::load("models/llama".as_ref(), None, &mut group)?;
//! let answer = model.generate(&[1, 15, 27], &GenerateOptions::default(), &mut group)?;
//! println!("{:?}", answer.tokens);
//! # Ok(())
//! # }
//! ```
//!
//! | to | use |
//! |---|---|
//! | generate from token ids | [`Llama::generate`] |
//! | generate from text or a chat | [`TextModel`], which adds a [`Tokenizer`] and a [`ChatTemplate`] |
//! | decode many sequences at a time, as a scheduler does | [`Decoder`] |
//! | put layers together by hand | [`linear`], [`attention`], [`mlp`], [`embedding`], [`norm`] |
//! | run layers on an engine's own communicator; whole models need a process group | [`Communicator`] |
//! | give weights that are in no folder | [`checkpoint::MemorySource`] or your own [`checkpoint::WeightSource`], in a [`checkpoint::Loader`] |
//! | compute on GPUs or on your own device | [`Compute`]: [`Cuda`], [`Host`] |
//! | know which world sizes a model can have | [`legal_world_sizes`] |

mod argmax;
pub mod attention;
pub mod checkpoint;
mod communicator;
pub mod compute;
mod digest;
pub mod embedding;
mod error;
mod float;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
mod gpu;
pub mod linear;
mod memory;
pub mod mlp;
pub mod model;
pub mod norm;
mod python_json;
mod rotary;
pub mod shard;
mod storage;
mod tensor;
#[cfg(test)]
mod testing;
mod threads;

pub use attention::CacheSize;
pub use checkpoint::Checkpoint;
pub use communicator::Communicator;
pub use compute::{Compute, Cuda, Host};
pub use error::{ConfigurationError, Error, RemoteError, RequestError, Result};
pub use float::UnsupportedDType;
pub use generate::{
    ChatError, ChatTemplate, ChatTime, GenerateOptions, Generated, Message, Penalties, Sampling, StopReason,
    TextModel, TextStream, Tokenizer,
};
pub use model::{
    Decoder, GreedyPass, Llama, LlamaConfig, LoadReport, ModelGroups, NextTokens, Passes, check_stages,
    check_world_size, legal_world_sizes,
};
pub use tensor::Tensor;

#[cfg(test)]
mod tests {
    use super::*;

    /// Checked at compile time.
    #[test]
    fn engines_share_a_model_and_move_decoders_to_threads() {
        fn shared<T: Send + Sync + 'static>() {}
        fn moved<T: Send + 'static>() {}
        shared::<Llama>();
        shared::<Cuda>();
        shared::<Host>();
        shared::<Tensor>();
        moved::<Decoder>();
    }
}
