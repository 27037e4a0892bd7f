//! `ryz doctor`: what this machine has, what of it will do, and what to do about the rest.
//!
//! Probes gather [`Facts`]; [`judge`] turns them into findings without looking at anything else.

mod facts;
mod finding;
mod judge;
mod probe;

use std::path::Path;

use ryzanstein_config::Config;

pub use facts::{
    DriverSide, Facts, GpuSide, Host, InfinibandPort, Interface, Library, Network, Trial, TrialOutcome,
};
pub use finding::{Finding, Report, Status};
pub use judge::judge;
pub use probe::{read_memory_of, try_all_reduce};

use crate::rendezvous::Environment;

/// Looks at this machine. Nothing is changed: no setting of a GPU, no limit.
///
/// What could bring a process down is done in another one: `program` is run with the argument `__probe` and what
/// [`try_all_reduce`] and [`read_memory_of`] need. Each such try has a deadline.
pub fn examine(config: &Config, environment: &Environment, program: &Path) -> Report {
    let facts = probe::facts(config, environment, program);
    let findings = judge(&facts);
    let driver = facts.gpu.driver.unwrap_or_default();
    Report::new(crate::host_name(), findings, driver.gpus, driver.pairs)
}
