//! Helpers that unit tests of several modules share.

use std::sync::mpsc;
use std::time::Duration;

use crate::membership::roster::{Cpus, Member};
use crate::types::rank::{LocalRank, Rank};

/// Far more than any unit test takes, but short for a test that has failed.
pub(crate) const LATE: Duration = Duration::from_secs(20);

/// Returns a member of a job on one host, in this process.
pub(crate) fn member(rank: Rank) -> Member {
    Member {
        rank,
        local_rank: LocalRank(rank.0),
        node_rank: 0,
        host: "here".into(),
        pid: std::process::id(),
        cpus: Cpus::default(),
        data_address: None,
    }
}

/// Returns the result of `work`, or fails if a defect makes it hang.
pub(crate) fn in_time<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, result) = mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    result.recv_timeout(LATE).expect("it ends in time")
}
