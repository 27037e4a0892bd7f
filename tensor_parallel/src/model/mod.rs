//! Whole architectures, built from the layers.

mod config;
pub(crate) mod config_error;
mod decoder;
mod footprint;
mod json;
mod llama;
mod load;
mod plan;
mod report;
mod rope;

pub use self::config::{Architecture, LlamaConfig};
pub use self::config_error::{ConfigError, ModelFileError};
pub use self::decoder::{Decoder, Passes};
pub use self::footprint::{Footprint, footprint};
pub use self::llama::Llama;
pub(crate) use self::load::check_all_ranks;
pub use self::plan::{TensorSpec, all_reduces, check_world_size, legal_world_sizes, tensors};
pub use self::report::LoadReport;

#[cfg(test)]
mod tests;
