//! The most used items for embedding programs: `use ryzanstein_orchestrator::prelude::*;`.

pub use ryzanstein_config::{BackendChoice, Config};
pub use ryzanstein_process_group::{
    Buffer, BufferMut, DType, MemoryRendezvous, ProcessGroup, ProcessGroupManager, Rank, ReduceOp, Work,
};
pub use ryzanstein_tensor_parallel::{
    ChatTemplate, ChatTime, Decoder, GenerateOptions, Generated, Llama, Message, Passes, Penalties, Sampling,
    Tensor, TextModel, TextStream, Tokenizer,
};

pub use crate::{Builder, Orchestrator};
