//! Starts the ranks of a job, supervises them and ends them.
//!
//! `core` decides; [`run`](self::run()) acts. [`run_supervisor`] is the launcher, the parent process of the
//! supervisor: if either of the two is killed, the other ends every rank.

mod affinity;
pub(crate) mod core;
mod descendants;
pub(crate) mod health;
mod job;
mod launcher;
mod node_heartbeat;
mod output;
pub(crate) mod proc;
mod rank_process;
mod rendezvous_host;
mod report;
mod run;
mod spawn;

pub use job::{Job, LaunchError, RankOutput, check_program};
pub use launcher::run_supervisor;
pub use report::{ClosingReport, Failure, RankExit};
pub use run::run;
