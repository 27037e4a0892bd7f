//! Helpers for tests with several ranks.

pub mod batch;
pub mod conformance;
pub mod fixtures;
pub mod gpu;
pub mod pattern;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use ryzanstein_config::{BackendChoice, Config, EncryptionChoice, Timeout};
use ryzanstein_process_group::device::LibrarySearch;
use ryzanstein_process_group::{
    Candidate, Element, Membership, MemoryRendezvous, ProcessGroup, ProcessGroupManager, Rendezvous, Result,
};

/// Settings for tests: the given backend, and deadlines that fail a test instead of hanging it.
pub fn config(backend: BackendChoice) -> Config {
    let mut config = Config::default();
    config.process_group.backend = backend;
    config.process_group.timeout = Timeout::from_secs(300);
    config
}

/// As [`config`], for TCP on links that are encrypted.
pub fn encrypted() -> Config {
    let mut config = sockets();
    config.security.encryption = EncryptionChoice::On;
    config
}

/// Settings of ranks whose links are sockets, although they are on one host.
pub fn sockets() -> Config {
    let mut config = config(BackendChoice::Tcp);
    config.process_group.tcp.shared_memory = false;
    config
}

/// Runs `rank_main` on `world_size` ranks, each a thread with a manager of its own, and returns what they return.
///
/// # Panics
/// When a rank panics or cannot initialise.
pub fn with_ranks<R: Send>(
    config: &Config,
    world_size: usize,
    rank_main: impl Fn(ProcessGroupManager) -> R + Sync,
) -> Vec<R> {
    try_ranks(config, world_size, |manager| {
        let manager = manager.expect("every rank initialises");
        // A rank that fails on purpose would else be heard by those still in their start-up check.
        manager.store_barrier("every rank is initialised", SOON).expect("every rank comes here");
        rank_main(manager)
    })
}

/// [`with_ranks`], whose ranks then leave in good order.
///
/// # Panics
/// As there, and when a rank cannot leave.
pub fn in_good_order<R: Send>(
    config: &Config,
    world_size: usize,
    job: impl Fn(&mut ProcessGroupManager) -> R + Sync,
) -> Vec<R> {
    with_ranks(config, world_size, |mut manager| {
        let result = job(&mut manager);
        manager.finalize().expect("every rank leaves");
        result
    })
}

/// Like [`with_ranks`], but hands over what became of the initialisation.
///
/// # Panics
/// When a rank panics.
pub fn try_ranks<R: Send>(
    config: &Config,
    world_size: usize,
    rank_main: impl Fn(Result<ProcessGroupManager>) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = MemoryRendezvous::new(world_size)
            .into_iter()
            .map(|rendezvous| {
                let rank_main = &rank_main;
                scope.spawn(move || {
                    let search = LibrarySearch::from_variables(|name| std::env::var(name).ok());
                    rank_main(ProcessGroupManager::initialize_with(config, &rendezvous, &search))
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    })
}

/// Runs `rank_main` on one rank for each of `hosts`, which names the host that the rank believes to be on.
///
/// # Panics
/// When a rank panics or cannot initialise.
pub fn on_hosts(config: &Config, hosts: &[&'static str], rank_main: impl Fn(ProcessGroupManager) + Sync) {
    std::thread::scope(|scope| {
        let start = |(host, rendezvous)| {
            let (rank_main, rendezvous) = (&rank_main, OnHost { host, rendezvous });
            scope.spawn(move || {
                let manager = ProcessGroupManager::initialize(config, &rendezvous);
                rank_main(manager.expect("every rank initialises"));
            })
        };
        let ranks: Vec<_> =
            hosts.iter().copied().zip(MemoryRendezvous::new(hosts.len())).map(start).collect();
        // The scope alone would not wait until the threads are gone.
        for rank in ranks {
            rank.join().unwrap_or_else(|p| std::panic::resume_unwind(p));
        }
    });
}

/// A rendezvous to which a rank tells another host than that of the test.
struct OnHost {
    host: &'static str,
    rendezvous: MemoryRendezvous,
}

impl Rendezvous for OnHost {
    fn local_address(&self) -> Result<IpAddr> {
        self.rendezvous.local_address()
    }

    fn join(&self, candidate: Candidate, deadline: Instant) -> Result<Membership> {
        self.rendezvous.join(Candidate { host: self.host.into(), ..candidate }, deadline)
    }
}

/// Runs `rank_main` on every rank of a loopback group, each on a thread, and returns what they return.
///
/// # Panics
/// When a rank panics.
pub fn on_loopback<R: Send>(world_size: usize, rank_main: impl Fn(&mut ProcessGroup) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = ProcessGroup::loopback(world_size)
            .into_iter()
            .map(|mut group| {
                let rank_main = &rank_main;
                scope.spawn(move || rank_main(&mut group))
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    })
}

/// An element that small integers convert to exactly, whatever its type.
pub trait Small: Element {
    /// From a number below 256.
    fn small(value: u32) -> Self;
}

macro_rules! small {
    ($($type:ty: $value:ident => $make:expr),* $(,)?) => {$(
        impl Small for $type {
            fn small($value: u32) -> Self { $make }
        }
    )*};
}
small! {
    f32: v => v as Self,
    f64: v => f64::from(v),
    f16: v => Self::from_f32(v as f32),
    bf16: v => Self::from_f32(v as f32),
    i8: v => v as Self,
    u8: v => v as Self,
    i32: v => v as Self,
    u32: v => v,
    i64: v => i64::from(v),
    u64: v => u64::from(v),
}

/// Returns true if two results are the same to the last bit.
pub fn same_bits<T: Element>(a: &[T], b: &[T]) -> bool {
    bytemuck::cast_slice::<T, u8>(a) == bytemuck::cast_slice::<T, u8>(b)
}

/// The greatest magnitude among values.
///
/// # Panics
/// When one is not finite: a maximum would pass a NaN over.
#[track_caller]
pub fn greatest(values: &[f32]) -> f32 {
    let strange = values.iter().position(|v| !v.is_finite());
    assert!(strange.is_none(), "value {} of {} is not finite", strange.unwrap_or(0), values.len());
    values.iter().fold(0.0, |most, v| most.max(v.abs()))
}

/// The greatest difference between two lists of values.
///
/// # Panics
/// When their lengths differ, and as [`greatest`].
#[track_caller]
pub fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len(), "lists of different lengths");
    let differences: Vec<f32> = got.iter().zip(want).map(|(got, want)| got - want).collect();
    greatest(&differences)
}

/// Checks that no value is farther from the one wanted than a hundred-thousandth of the greatest.
///
/// # Panics
/// When one is, and as [`distance`].
#[track_caller]
pub fn near(got: &[f32], want: &[f32]) {
    let (difference, largest) = (distance(got, want), greatest(want));
    assert!(difference <= 1e-5 * largest, "{difference} of {largest}");
}

/// A generous deadline for things that should take milliseconds.
pub const SOON: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_is_that_of_the_farthest_pair() {
        assert_eq!(distance(&[1.0, -2.0, 0.5], &[1.5, 1.0, 0.5]), 3.0);
    }

    #[test]
    fn what_is_not_finite_or_not_there_has_no_distance() {
        for (got, want) in
            [(&[1.0, f32::NAN][..], &[1.0, 1.0][..]), (&[f32::INFINITY], &[0.0]), (&[1.0], &[1.0, 1.0])]
        {
            let measured = std::panic::catch_unwind(|| distance(got, want));
            assert!(measured.is_err(), "{got:?} {want:?}");
        }
    }
}

/// The examples of the README and of the book's pages for programs, compiled and run with the other documentation tests.
#[cfg(doctest)]
mod written_elsewhere {
    #[doc = include_str!("../../README.md")]
    struct Readme;

    #[doc = include_str!("../../docs/src/embedding.md")]
    struct Embedding;

    #[doc = include_str!("../../docs/src/overlap.md")]
    struct Overlap;

    #[doc = include_str!("../../docs/src/pipeline.md")]
    struct Pipeline;
}
