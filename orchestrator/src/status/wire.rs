//! The messages, as generated from `proto/status.proto`.

// Fields are documented in the .proto; lints are for code people write.
#![allow(missing_docs, unreachable_pub, clippy::pedantic, clippy::all)]

#[rustfmt::skip]
#[path = "generated.rs"]
mod generated;

pub use generated::*;
