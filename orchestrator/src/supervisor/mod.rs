//! Starts the ranks of a job, watches over them and ends them.
//!
//! [`core`] decides; [`run`] carries out. [`guard`] is the process in front, which sees to it that nothing survives when
//! either is killed.

pub mod core;
mod descendants;
mod front;
mod job;
mod output;
mod place;
mod process;
mod report;
mod spawn;

pub use front::guard;
pub use job::{Job, LaunchError, check_program};
pub use process::run;
pub use report::{ClosingReport, Failure, RankEnd};
