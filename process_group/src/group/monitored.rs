//! A barrier that says who was late, and by how much.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::ProcessGroup;
use crate::deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::store::{Store, group_key};

/// How long after the first rank one came.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Arrival {
    /// The global rank.
    pub rank: Rank,
    /// Since the first rank came, by each host's own clock: between hosts it is as exact as those agree.
    pub late: Duration,
}

/// How long the others wait for the verdict behind the deadline at which rank 0 forms it.
const VERDICT: Duration = Duration::from_secs(1);

#[derive(Serialize, Deserialize)]
struct Verdict {
    arrivals: Vec<Arrival>,
    missing: Vec<Rank>,
}

impl ProcessGroup {
    /// Waits until every member has come, and tells every member how late each was, latest first. For finding
    /// stragglers: it goes through the job's store, `O(n)` messages by way of the group's rank 0, so it works while links
    /// hang, and a member that does not come leaves the group usable.
    ///
    /// # Errors
    /// [`Error::Timeout`], the same on all members that came, naming those that did not.
    pub fn monitored_barrier(&mut self, timeout: Duration) -> Result<Vec<Arrival>> {
        let Some(words) = &self.engine.last_words else {
            return Err(Error::invalid(
                "a monitored barrier needs the job's store, and this group was made without one",
            ));
        };
        self.monitored += 1;
        let barrier = group_key("monitored", &self.info.name, self.monitored);
        let started = Instant::now();
        let store = &*words.store;
        store.set(&format!("{barrier}/{}", self.info.rank), &now().to_le_bytes())?;
        let verdict = if self.info.rank.0 == 0 {
            let verdict = collect(store, &barrier, &self.info.members, deadline::after(started, timeout))?;
            store.set(&format!("{barrier}/verdict"), &super::objects::encode(&verdict)?)?;
            verdict
        } else {
            let until = deadline::after(started, timeout) + VERDICT;
            let bytes = store.get(&format!("{barrier}/verdict"), until).map_err(|error| match error {
                Error::Timeout { .. } => timed_out(self, started, vec![self.info.members[0]]),
                other => other,
            })?;
            super::objects::decode(&bytes, self.info.members[0])?
        };
        if verdict.missing.is_empty() {
            return Ok(verdict.arrivals);
        }
        Err(timed_out(self, started, verdict.missing))
    }
}

fn timed_out(group: &ProcessGroup, started: Instant, missing: Vec<Rank>) -> Error {
    let what = format!("monitored barrier of group `{}`", group.info.name);
    Error::Timeout { what, waited: started.elapsed(), missing }
}

fn collect(store: &dyn Store, barrier: &str, members: &[Rank], deadline: Instant) -> Result<Verdict> {
    let (mut came, mut missing) = (Vec::new(), Vec::new());
    for (position, &rank) in members.iter().enumerate() {
        match store.get(&format!("{barrier}/{position}"), deadline) {
            Ok(bytes) => {
                let nanos = <[u8; 8]>::try_from(bytes).map_or(0, u64::from_le_bytes);
                came.push((rank, nanos));
            }
            Err(Error::Timeout { .. }) => missing.push(rank),
            Err(error) => return Err(error),
        }
    }
    let first = came.iter().map(|(_, nanos)| *nanos).min().unwrap_or(0);
    let mut arrivals: Vec<Arrival> = came
        .into_iter()
        .map(|(rank, nanos)| Arrival { rank, late: Duration::from_nanos(nanos - first) })
        .collect();
    arrivals.sort_by_key(|a| (std::cmp::Reverse(a.late), a.rank));
    Ok(Verdict { arrivals, missing })
}

/// Nanoseconds since 1970; enough for five centuries.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}
