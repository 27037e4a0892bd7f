//! Helpers for tests on GPUs.

#![allow(dead_code, reason = "each test program uses a part")]

use std::time::Duration;

use ryzanstein_config::{BackendChoice, Config};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_process_group::{Error, ProcessGroup, Rank, ReduceOp};
use ryzanstein_tests::config;
use ryzanstein_tests::gpu::{Ranks, need, role};

/// Timeout of a whole test.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);
/// Timeout of something that should take seconds.
pub(crate) const SOON: Duration = Duration::from_secs(30);

pub(crate) fn initialize(config: &Config) -> Result<Orchestrator, Error> {
    Orchestrator::initialize(config, &std::env::vars().collect())
}

pub(crate) fn nccl() -> Config {
    config(BackendChoice::Nccl)
}

/// In the test program: starts itself as `n` ranks and waits until all have ended well. In a rank: runs `rank`.
pub(crate) fn on_gpus(name: &str, n: usize, config: &Config, rank: impl FnOnce(&mut Orchestrator)) {
    if role().is_some() {
        let mut orchestrator = initialize(config).expect("this rank initialises");
        rank(&mut orchestrator);
        orchestrator.finalize().expect("this rank leaves in good order");
        return;
    }
    need(n);
    Ranks::start(name, n).expect_all(PATIENCE);
}

/// Everybody's number, added up over the group.
pub(crate) fn sum_of_ranks(group: &mut ProcessGroup, mine: Rank) {
    let mut x = group.upload(&[mine.0]).unwrap();
    group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    let want = group.members().iter().map(|r| r.0).sum::<u32>();
    assert_eq!(group.download(&x).unwrap(), [want], "group {}", group.name());
}
