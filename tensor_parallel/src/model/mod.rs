//! Whole architectures put together from the layers.

mod config;
mod decoder;
mod keys;
mod llama;
mod load;
mod plan;
mod report;
mod rope;

pub use self::config::{Architecture, LlamaConfig};
pub use self::decoder::Decoder;
pub use self::llama::Llama;
pub use self::plan::{TensorSpec, check_world_size, legal_world_sizes, tensors};
pub use self::report::LoadReport;

#[cfg(test)]
mod tests;
