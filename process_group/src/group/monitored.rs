//! A barrier that reports which ranks were late, and by how much.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::ProcessGroup;
use crate::error::{Error, Result};
use crate::types::deadline;
use crate::types::rank::Rank;

/// The delay of a rank relative to the first one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Arrival {
    /// The global rank.
    pub rank: Rank,
    /// Time since the arrival of the first rank, by each host's own clock: between hosts it is as exact as these clocks agree.
    pub late: Duration,
}

impl ProcessGroup {
    /// Waits until every member has arrived, and reports to every member the delay of each, latest first. It serves to find
    /// stragglers: it uses the job's store, with `O(n)` messages, so it works while links hang, and a missing member leaves the
    /// group usable.
    ///
    /// # Errors
    /// [`Error::Timeout`], the same on all members that arrived, naming those that did not.
    pub fn monitored_barrier(&mut self, timeout: Duration) -> Result<Vec<Arrival>> {
        let Some(reasons) = &self.inner.abort_reasons else {
            return Err(Error::invalid(
                "a monitored barrier needs the job's store, and this group was made without one",
            ));
        };
        let started = Instant::now();
        let (rank, n, until) = (self.info.rank, self.world_size(), deadline::after(started, timeout));
        let barrier = ("monitored", self.info.name.as_str());
        let values = self.monitored.gather(&*reasons.store, barrier, rank, n, now(), until)?;
        let (mut came, mut missing) = (Vec::new(), Vec::new());
        for (&rank, nanos) in self.info.members.iter().zip(values) {
            match nanos {
                Some(nanos) => came.push((rank, nanos)),
                None => missing.push(rank),
            }
        }
        if !missing.is_empty() {
            let own = self.info.members[rank.index()];
            let late = if missing.contains(&own) {
                ", which this rank reached after the others had given up,"
            } else {
                ""
            };
            let what = format!("monitored barrier of group `{}`{late}", self.info.name);
            return Err(Error::Timeout { what, waited: started.elapsed(), missing });
        }
        let first = came.iter().map(|(_, nanos)| *nanos).min().unwrap_or(0);
        let mut arrivals: Vec<Arrival> = came
            .into_iter()
            .map(|(rank, nanos)| Arrival { rank, late: Duration::from_nanos(nanos - first) })
            .collect();
        arrivals.sort_by_key(|a| (std::cmp::Reverse(a.late), a.rank));
        Ok(arrivals)
    }
}

/// Returns the nanoseconds since 1970; enough for five centuries.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}
