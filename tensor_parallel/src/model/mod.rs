//! Whole architectures, built from the layers.

mod architecture;
mod config;
mod decoder;
mod footprint;
mod groups;
mod json;
mod llama;
mod load;
mod plan;
mod report;
mod rope;
mod stage;

pub use self::architecture::{ARCHITECTURES, Architecture};
pub use self::config::LlamaConfig;
pub use self::decoder::{Decoder, GreedyPass, NextTokens, Passes};
#[doc(hidden)]
pub use self::footprint::{Footprint, footprint};
pub use self::groups::ModelGroups;
pub(crate) use self::groups::{all_gather, broadcast, synchronize};
pub use self::llama::Llama;
pub(crate) use self::load::check_all_ranks;
pub(crate) use self::plan::HEAD;
#[doc(hidden)]
pub use self::plan::{TensorSpec, all_reduces, stage_tensors, tensors};
pub use self::plan::{check_stages, check_world_size, legal_world_sizes};
pub use self::report::LoadReport;
#[doc(hidden)]
pub use self::stage::Stage;

#[cfg(test)]
mod tests;
