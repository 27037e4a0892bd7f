//! The processes of one job: rendezvous, launcher, checks and measurements, and the `ryz` command.
//!
//! An embedding program creates an [`Orchestrator`] per rank. A launcher calls [`supervisor::run`].

#[cfg(feature = "cli")]
pub mod bench;
pub mod catalogue;
#[cfg(feature = "cli")]
mod cgroup;
#[cfg(feature = "cli")]
pub mod check;
#[cfg(feature = "cli")]
pub mod communication;
#[cfg(feature = "server")]
pub mod console;
pub mod control;
#[cfg(feature = "cli")]
pub mod doctor;
#[cfg(feature = "cli")]
mod drawing;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "cli")]
pub mod generate;
mod heartbeat;
pub mod hub;
#[cfg(feature = "cli")]
pub mod interconnect;
#[cfg(feature = "cli")]
pub mod measure;
pub mod metric_names;
pub mod nccl_settings;
mod orchestrator;
#[cfg(feature = "cli")]
pub mod output_file;
#[cfg(feature = "cli")]
pub mod plan;
pub mod prelude;
pub mod rendezvous;
pub mod status;
#[cfg(feature = "server")]
pub mod supervisor;
pub mod table;
#[cfg(feature = "telemetry")]
pub mod telemetry;
#[cfg(feature = "cli")]
pub mod topo;
#[cfg(any(feature = "cli", feature = "fuzzing"))]
pub mod trace;
#[cfg(feature = "cli")]
pub mod tune;

pub use orchestrator::{Builder, Orchestrator};
/// The crates below this one, so that an embedding program needs only this dependency.
pub use {
    ryzanstein_config as config, ryzanstein_process_group as process_group,
    ryzanstein_tensor_parallel as tensor_parallel,
};

/// The version of this crate, which must be the same on all ranks of a job.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The host name.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A count with its noun: `1 rank`, `4 ranks`.
pub fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// The examples of the README and of the book's pages for programs, compiled and run with the other documentation tests.
#[cfg(doctest)]
mod written_elsewhere {
    #[doc = include_str!("../../README.md")]
    struct Readme;

    #[doc = include_str!("../../docs/src/embedding.md")]
    struct Embedding;

    #[doc = include_str!("../../docs/src/overlap.md")]
    struct Overlap;

    #[doc = include_str!("../../docs/src/pipeline.md")]
    struct Pipeline;
}
