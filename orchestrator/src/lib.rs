//! The processes of one job: rendezvous, launcher, checks and measurements, and the `ryz` command.
//!
//! An embedding program creates an [`Orchestrator`] per rank. A launcher calls [`supervisor::run`].

pub mod bench;
pub mod check;
pub mod control;
pub mod doctor;
pub mod generate;
pub mod hub;
pub mod measure;
pub mod nccl_settings;
mod orchestrator;
pub mod rendezvous;
pub mod supervisor;
pub mod telemetry;

pub use orchestrator::Orchestrator;

/// The version of this crate, which must be the same on all ranks of a job.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The host name.
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
