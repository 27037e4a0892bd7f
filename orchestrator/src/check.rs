//! `ryz check`: one rank's self-check, and the default job.

use std::fmt::Write as _;
use std::time::Instant;

use ryzanstein_config::Config;
use ryzanstein_process_group::store::barrier;
use ryzanstein_process_group::{BackendKind, Candidate, Capability, Rendezvous, Result};

use crate::rendezvous::Connection;

/// Joins, waits until all are there, and returns what rank 0 prints: who is there. None on other ranks.
///
/// # Errors
/// When the ranks do not find each other.
pub fn run(config: &Config, connection: &Connection) -> Result<Option<String>> {
    let deadline = Instant::now() + config.rendezvous.timeout.get();
    let candidate = Candidate {
        host: crate::host_name(),
        pid: std::process::id(),
        cpus: 1,
        data_address: None,
        wanted: config.process_group.backend,
        capabilities: vec![
            Capability { backend: BackendKind::Nccl, obstacle: Some("not looked for".into()) },
            Capability { backend: BackendKind::Tcp, obstacle: None },
        ],
    };
    let membership = connection.join(candidate, deadline)?;
    let roster = &membership.roster;
    barrier(&*membership.store, "check/start", membership.rank, roster.world_size(), deadline)?;
    if membership.rank.0 != 0 {
        return Ok(None);
    }
    let mut table = format!("{:>5}  {:>5}  {:>8}  host\n", "rank", "local", "pid");
    for member in &roster.members {
        let _ = writeln!(
            table,
            "{:>5}  {:>5}  {:>8}  {}",
            member.rank, member.local_rank, member.pid, member.host
        );
    }
    let _ = writeln!(
        table,
        "ranks: {}, epoch: {}, backend: {}",
        roster.world_size(),
        roster.epoch,
        membership.agreement.reason
    );
    Ok(Some(table))
}
