//! The most used items for applications: `use ryzanstein_orchestrator::prelude::*;`.
//!
//! It has no name that `candle_core` exports, so that both can be imported by `*`: `Tensor` is in
//! [`tensor_parallel`](crate::tensor_parallel), `DType` in [`process_group`](crate::process_group), `Config` in
//! [`config`](crate::config).

pub use ryzanstein_process_group::{
    Buffer, BufferMut, MemoryRendezvous, ProcessGroup, ProcessGroupManager, Rank, ReduceOp, Work,
};
pub use ryzanstein_tensor_parallel::{
    ChatTemplate, ChatTime, Communicator, Decoder, GenerateOptions, Generated, GreedyPass, Llama, Message,
    NextTokens, Passes, Penalties, Sampling, TextModel, TextStream, Tokenizer,
};

pub use crate::{Builder, Orchestrator};
