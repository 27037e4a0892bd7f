//! The processes of one job: how they find each other, how they are started and ended, and the `ryz` command.
//!
//! A rank calls [`rendezvous::connect`] and hands what it gets to the process group. A launcher calls
//! [`supervisor::run`].

pub mod bench;
pub mod check;
pub mod control;
pub mod doctor;
pub mod generate;
pub mod measure;
pub mod nccl_settings;
mod orchestrator;
pub mod rendezvous;
pub mod supervisor;
pub mod telemetry;

pub use orchestrator::Orchestrator;

/// The version that all ranks of a job must share.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What this host calls itself.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The examples of the README and of the book's page on embedding, compiled and run with the other documentation tests.
#[cfg(doctest)]
mod written_elsewhere {
    #[doc = include_str!("../../README.md")]
    struct Readme;

    #[doc = include_str!("../../docs/src/embedding.md")]
    struct Embedding;
}
