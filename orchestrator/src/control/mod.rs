//! The control protocol's messages, generated from `proto/control.proto`.

// Fields are documented in the .proto; lints are for code people write.
#![allow(missing_docs, unreachable_pub, clippy::pedantic, clippy::all)]

#[rustfmt::skip]
mod generated;

pub use generated::*;
