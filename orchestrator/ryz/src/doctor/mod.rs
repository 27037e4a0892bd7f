//! `ryz doctor`: the equipment of this machine, its faults, and their remedies.
//!
//! Probes gather [`Facts`]; [`diagnose()`] turns them into findings without access to anything else.

mod diagnose;
mod facts;
mod finding;
mod hosts;
mod probe;

use std::ffi::OsString;
use std::process::Command;

use ryzanstein_config::Config;

pub use diagnose::diagnose;
pub(crate) use diagnose::tensor_parallel;
pub use facts::{
    DriverFacts, Fabric, Facts, GpuFacts, Hardware, Host, InfinibandPort, Interface, Library, Network,
    NumaNode, PciPlace, TemporaryFolder, Trial, TrialOutcome, VerbsPort, VisibleGpu,
};
pub use finding::{Finding, Report, Status};
pub use hosts::{HostLink, diagnose_links, links_table, measure_links};
pub use probe::{hardware, machine, try_all_reduce, visible_gpus};

use ryzanstein_orchestrator::rendezvous::Environment;

/// Examines this machine. Changes nothing: no setting of a GPU, no limit.
///
/// Probes that could crash or block a process run in another one, started with `probe`, each time with a deadline.
pub fn examine(config: &Config, environment: &Environment, probe: &ProbeCommand) -> Report {
    let facts = probe::facts(config, environment, probe);
    let findings = diagnose(&facts);
    let driver = facts.gpu.driver.unwrap_or_default();
    Report::new(ryzanstein_orchestrator::host_name(), findings, driver.gpus, driver.pairs)
}

/// Returns a sentence if this machine is busy with other work, so that measured times are not its own.
pub fn busy() -> Option<String> {
    diagnose::busy(probe::load(), probe::processors())
}

/// The command that starts the process of a probe. One of these follows `arguments`:
///
/// * `gpus`: print what [`visible_gpus`] returns, as JSON;
/// * `all-reduce BACKEND RANKS`: print what [`try_all_reduce`] returns, as JSON, under the caller's settings.
///
/// In JSON, errors are represented by their texts.
#[derive(Clone, Debug)]
pub struct ProbeCommand {
    /// The program.
    pub program: OsString,
    /// Its leading arguments.
    pub arguments: Vec<OsString>,
}

impl ProbeCommand {
    fn command(&self, what: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).args(what);
        command
    }
}
