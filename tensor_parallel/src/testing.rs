//! What the tests of several modules need.

use std::path::{Path, PathBuf};

use ryzanstein_process_group::ProcessGroup;

/// Returns the path of a file or folder in `tests/fixtures`.
pub(crate) fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(path)
}

/// Runs `work` on every rank of a loopback group, each on a thread, and returns their results.
pub(crate) fn on_loopback<T: Send>(
    world_size: usize,
    work: impl Fn(&mut ProcessGroup) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |mut group| scope.spawn(move || work(&mut group));
        let ranks: Vec<_> = ProcessGroup::loopback(world_size).into_iter().map(start).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
