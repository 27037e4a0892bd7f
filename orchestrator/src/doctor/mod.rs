//! `ryz doctor`: what this machine has, what of it will do, and what to do about the rest.
//!
//! Probes gather [`Facts`]; [`diagnose`] turns them into findings without looking at anything else.

mod diagnose;
mod facts;
mod finding;
mod probe;

use std::ffi::OsString;
use std::process::Command;

use ryzanstein_config::Config;

pub use diagnose::diagnose;
pub use facts::{
    DriverFacts, Facts, GpuFacts, Host, InfinibandPort, Interface, Library, Network, Trial, TrialOutcome,
    VisibleGpu,
};
pub use finding::{Finding, Report, Status};
pub use probe::{read_memory_of, try_all_reduce, visible_gpus};

use crate::rendezvous::Environment;

/// Looks at this machine. Nothing is changed: no setting of a GPU, no limit.
///
/// What could bring a process down is done in another one, `helper`, each time with a deadline.
pub fn examine(config: &Config, environment: &Environment, helper: &ProbeCommand) -> Report {
    let facts = probe::facts(config, environment, helper);
    let findings = diagnose(&facts);
    let driver = facts.gpu.driver.unwrap_or_default();
    Report::new(crate::host_name(), findings, driver.gpus, driver.pairs)
}

/// How to start a process that tries things: a program that passes on what follows its arguments.
///
/// With `memory PID ADDRESS` it prints what [`read_memory_of`] reads; with `gpus` it prints what [`visible_gpus`] returns, and
/// with `all-reduce BACKEND RANKS` what [`try_all_reduce`] returns, as JSON, under the same settings as the caller's.
#[derive(Clone, Debug)]
pub struct ProbeCommand {
    /// The program.
    pub program: OsString,
    /// Its first arguments.
    pub arguments: Vec<OsString>,
}

impl ProbeCommand {
    fn command(&self, what: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).args(what);
        command
    }
}
