//! The processes of one job: rendezvous, launcher, heartbeats and telemetry, as a library.
//!
//! Start at [`Orchestrator`]: a rank of an application makes one, and gets its process groups and models from it.
//!
//! ```
//! use ryzanstein_orchestrator::prelude::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Under `ryz launch`, torchrun, Slurm or MPI this is one rank of the job; alone, it is a job of one.
//! let mut orchestrator = Orchestrator::builder().initialize()?;
//! let mut x = [1.0f32, 2.0];
//! orchestrator.manager().world().all_reduce(&mut x, ReduceOp::Sum)?;
//! orchestrator.finalize()?;
//! # Ok(())
//! # }
//! ```
//!
//! | to | use |
//! |---|---|
//! | join a job that `ryz launch`, torchrun, Slurm or MPI started | [`Orchestrator::builder`] |
//! | load a model with its tokenizer, or without | [`Orchestrator::load_text_model`], [`Orchestrator::load_model`] |
//! | import all that an engine uses | [`prelude`] |
//! | start ranks and watch over them | [`supervisor::run`] |
//! | serve a rendezvous, or join one without an [`Orchestrator`] | [`rendezvous`] |
//! | log with the rank, serve metrics, send spans | `telemetry`, a feature that is on by default |
//! | set NCCL's variables in a program that `ryz launch` does not start | [`nccl_settings`] |

pub mod console;
mod heartbeat;
pub mod hub;
pub mod nccl_settings;
mod orchestrator;
pub mod prelude;
pub mod rendezvous;
pub mod supervisor;
#[cfg(feature = "telemetry")]
pub mod telemetry;

// For the command of this repository, its benchmarks and its tests; not a public API, may change at any time.
#[doc(hidden)]
pub mod catalogue;
#[doc(hidden)]
pub mod control;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[doc(hidden)]
pub mod metric_names;
#[doc(hidden)]
pub mod status;
#[doc(hidden)]
pub mod table;

pub use orchestrator::{Builder, Orchestrator};
/// The crates below this one, so that an application needs only this dependency.
pub use {
    ryzanstein_config as config, ryzanstein_process_group as process_group,
    ryzanstein_tensor_parallel as tensor_parallel,
};

/// The version of this crate, which must be the same on all ranks of a job.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the host name.
#[doc(hidden)]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Formats an error and its causes. Many errors quote their cause, which is not repeated.
#[doc(hidden)]
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let told = cause.to_string();
        if !text.contains(&told) {
            text = format!("{text}: {told}");
        }
        next = cause.source();
    }
    text
}

/// Formats a count with its noun: `1 rank`, `4 ranks`.
#[doc(hidden)]
pub fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
