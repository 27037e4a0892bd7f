//! The messages, as generated from `proto/status.proto`.

// Fields are documented in the .proto; lints are for code people write.
#![allow(missing_docs, unreachable_pub, clippy::pedantic, clippy::all)]

#[rustfmt::skip]
#[path = "generated.rs"]
mod generated;

pub use generated::*;

/// The descriptors of the messages, for clients that have no `.proto`.
pub const DESCRIPTORS: &[u8] = include_bytes!("descriptors.bin");
