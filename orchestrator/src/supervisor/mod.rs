//! Starts the ranks of a job, watches over them and ends them.
//!
//! [`core`] decides; [`run`] carries out. [`run_supervisor`] is the process in front, which sees to it that nothing survives when
//! either is killed.

pub mod core;
mod descendants;
mod job;
mod launcher;
mod output;
mod process;
mod rendezvous_host;
mod report;
mod spawn;

pub use job::{Job, LaunchError, check_program};
pub use launcher::run_supervisor;
pub use process::run;
pub use report::{ClosingReport, Failure, RankExit};
