//! A small key-value store shared by the ranks of a job.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::types::rank::Rank;
use crate::types::sync::lock;

/// Maximum length of a key in bytes.
pub const MAX_KEY: usize = 256;
/// Prefix of the keys that only launchers write.
pub const RESERVED: &str = "ryzanstein/";
/// Prefix of the keys that groups and managers write. A manager's store refuses them. An empty value removes such a key.
pub const OWN: &str = "ryzanstein-groups/";
/// Maximum length of a value in bytes.
pub const MAX_VALUE: usize = 256 << 10;

/// Maximum length of a group's name that a key contains unchanged.
const MAX_NAME: usize = 128;

/// Returns the key for information that a group's members exchange. A name may list every member: a digest replaces a long one.
pub(crate) fn group_key(kind: &str, group: &str, what: impl fmt::Display) -> String {
    if group.len() <= MAX_NAME {
        return format!("{OWN}{kind}/{group}/{what}");
    }
    let digest: [u8; 32] = Sha256::digest(group.as_bytes()).into();
    // Half of the digest is enough to distinguish the groups of a job.
    let half = u128::from_be_bytes(*digest.first_chunk().expect("32 bytes have 16"));
    format!("{OWN}{kind}/~{half:032x}/{what}")
}

/// A map from keys to bytes, for small data that ranks exchange. Calls block; every wait has a deadline.
///
/// Keys have at most [`MAX_KEY`] and values at most [`MAX_VALUE`] bytes. Ranks must not write keys that begin with [`RESERVED`]
/// or [`OWN`].
pub trait Store: Send + Sync {
    /// Stores a value. Replaces an older one. An empty value of a key that begins with [`OWN`] removes it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until the key exists and returns its value.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline.
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>>;

    /// Adds to a counter that starts at 0 and returns the new value.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;
}

/// Time for which the other ranks wait for the result after their deadline: rank 0 may have entered the barrier after them.
const GRACE: Duration = Duration::from_millis(500);

/// Waits until all `world_size` ranks have entered the barrier `name`.
///
/// All ranks get the same result: that of rank 0, or of the first rank whose deadline passes earlier. `O(n)` messages. A name serves
/// once; [`store_barrier`](crate::ProcessGroupManager::store_barrier) counts the uses of each.
///
/// # Errors
/// [`Error::Timeout`] that names the missing ranks.
pub fn barrier(
    store: &dyn Store,
    name: &str,
    rank: Rank,
    world_size: usize,
    deadline: Instant,
) -> Result<()> {
    let started = Instant::now();
    complete(name, started, barrier_gather(store, name, rank, world_size, 0, deadline)?)
}

/// Checks the values of the barrier `name`, by rank.
///
/// # Errors
/// [`Error::Timeout`] that names the ranks without one.
pub(crate) fn complete(name: &str, started: Instant, values: Vec<Option<u64>>) -> Result<()> {
    let missing: Vec<Rank> = Rank::all(values.len())
        .zip(values)
        .filter(|(_, value)| value.is_none())
        .map(|(rank, _)| rank)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Timeout { what: format!("barrier `{name}`"), waited: started.elapsed(), missing })
}

/// Returns the result of a [`barrier`], the same on every rank that entered it: by rank, the value of each that arrived in time.
pub(crate) fn barrier_gather(
    store: &dyn Store,
    name: &str,
    rank: Rank,
    world_size: usize,
    value: u64,
    deadline: Instant,
) -> Result<Vec<Option<u64>>> {
    let result = format!("{name}/result");
    let read = |until: Instant| match store.get(&result, until) {
        Ok(bytes) => rmp_serde::from_slice(&bytes).map(Some).map_err(|e| {
            Error::Rendezvous(format!(
                "the result of barrier `{name}` cannot be read: {e}; all ranks need the same version"
            ))
        }),
        Err(Error::Timeout { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    store.set(&format!("{name}/{rank}"), &value.to_le_bytes())?;
    if rank.0 != 0
        && let Some(values) = read(deadline.checked_add(GRACE).unwrap_or(deadline))?
    {
        return Ok(values);
    }
    let values = collect(store, name, world_size, deadline)?;
    if store.add(&format!("{name}/deciders"), 1)? > 1 {
        // Another rank has already decided. If it has exited since, this rank's own result is equally valid.
        return Ok(read(Instant::now() + GRACE)?.unwrap_or(values));
    }
    let bytes = rmp_serde::to_vec(&values)
        .map_err(|e| Error::Rendezvous(format!("the result of barrier `{name}` cannot be encoded: {e}")))?;
    store.set(&result, &bytes)?;
    Ok(values)
}

/// The rounds of a barrier that the same ranks enter again and again.
#[derive(Default, Debug)]
pub(crate) struct Rounds {
    /// Number of rounds that this rank has entered.
    entered: u64,
    /// Number of rounds whose keys this rank has removed.
    removed: u64,
}

impl Rounds {
    /// Enters the next round, as [`barrier_gather`]. A rank that has entered a round has left all earlier ones: when all ranks have, the
    /// keys of those are removed.
    pub(crate) fn gather(
        &mut self,
        store: &dyn Store,
        (kind, name): (&str, &str),
        rank: Rank,
        world_size: usize,
        value: u64,
        deadline: Instant,
    ) -> Result<Vec<Option<u64>>> {
        let this = self.entered;
        self.entered += 1;
        let values = barrier_gather(store, &group_key(kind, name, this), rank, world_size, value, deadline)?;
        if values.iter().all(Option::is_some) {
            for round in self.removed..this {
                let left = group_key(kind, name, round);
                // The barrier is over: a failure to remove a key is no news to a rank that has lost the store.
                let _ = store.set(&format!("{left}/{rank}"), &[]);
                if rank.0 == 0 {
                    let _ = store.set(&format!("{left}/result"), &[]);
                    let _ = store.set(&format!("{left}/deciders"), &[]);
                }
            }
            self.removed = this;
        }
        Ok(values)
    }
}

/// Collects the values of the ranks that arrive before the deadline.
fn collect(store: &dyn Store, name: &str, world_size: usize, deadline: Instant) -> Result<Vec<Option<u64>>> {
    let value = |rank: Rank| match store.get(&format!("{name}/{rank}"), deadline) {
        Ok(bytes) => Ok(Some(<[u8; 8]>::try_from(bytes).map_or(0, u64::from_le_bytes))),
        Err(Error::Timeout { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    Rank::all(world_size).map(value).collect()
}

/// Time for which a watched wait only looks at the store.
const ROUND: Duration = Duration::from_millis(200);

/// A store whose waits end with the first error of `check`: after that, the expected key may never be set.
pub(crate) struct Watched<'a, F> {
    pub(crate) store: &'a dyn Store,
    pub(crate) check: F,
}

impl<F: Fn() -> Result<()> + Send + Sync> Store for Watched<'_, F> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let started = Instant::now();
        loop {
            (self.check)()?;
            match self.store.get(key, deadline.min(Instant::now() + ROUND)) {
                Err(Error::Timeout { .. }) if Instant::now() < deadline => {}
                Err(Error::Timeout { what, missing, .. }) => {
                    return Err(Error::Timeout { what, waited: started.elapsed(), missing });
                }
                other => return other,
            }
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(key, amount)
    }
}

/// The store as programs see it: without the keys of groups and managers.
pub(crate) struct ProgramStore(pub(crate) Arc<dyn Store>);

impl ProgramStore {
    fn check(key: &str) -> Result<()> {
        if key.starts_with(OWN) {
            return Err(Error::invalid(format!(
                "the store key `{key}` begins with `{OWN}`, which is reserved for this library; use another one"
            )));
        }
        Ok(())
    }
}

impl Store for ProgramStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        Self::check(key)?;
        self.0.set(key, value)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        Self::check(key)?;
        self.0.get(key, deadline)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        Self::check(key)?;
        self.0.add(key, amount)
    }
}

/// The store of ranks that share a process.
#[derive(Default, Debug)]
pub struct MemoryStore {
    entries: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl MemoryStore {
    /// Creates an empty store.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Rejects keys and values that are too long, and keys that are [`RESERVED`].
///
/// # Errors
/// [`Error::Invalid`] with the reason.
pub fn check(key: &str, value: &[u8]) -> Result<()> {
    if key.is_empty() || key.len() > MAX_KEY {
        return Err(Error::invalid(format!(
            "a store key has 1 to {MAX_KEY} bytes; this one has {}",
            key.len()
        )));
    }
    if key.starts_with(RESERVED) {
        return Err(Error::invalid(format!(
            "the store key `{key}` begins with `{RESERVED}`, which is reserved for launchers; use another one"
        )));
    }
    if value.len() > MAX_VALUE {
        return Err(Error::invalid(format!(
            "the value of store key `{key}` has {} bytes; at most {MAX_VALUE} are allowed: send it with a collective",
            value.len()
        )));
    }
    Ok(())
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check(key, value)?;
        let mut entries = lock(&self.entries);
        if value.is_empty() && key.starts_with(OWN) {
            entries.remove(key);
            return Ok(());
        }
        entries.insert(key.to_owned(), value.to_vec());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let started = Instant::now();
        let patience = deadline.saturating_duration_since(started);
        let entries = self
            .changed
            .wait_timeout_while(lock(&self.entries), patience, |entries| !entries.contains_key(key))
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        entries.get(key).cloned().ok_or_else(|| Error::Timeout {
            what: format!("waiting for store key `{key}`"),
            waited: started.elapsed(),
            missing: Vec::new(),
        })
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        check(key, &[])?;
        let mut entries = lock(&self.entries);
        let value = entries.entry(key.to_owned()).or_insert_with(|| 0i64.to_le_bytes().to_vec());
        let Ok(bytes) = <[u8; 8]>::try_from(value.as_slice()) else {
            return Err(Error::invalid(format!("store key `{key}` holds no counter")));
        };
        let sum = i64::from_le_bytes(bytes).wrapping_add(amount);
        *value = sum.to_le_bytes().to_vec();
        self.changed.notify_all();
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::testing::LATE;

    #[test]
    fn a_late_rank_0_is_not_named_for_the_one_that_is_missing() {
        let (store, begun) = (MemoryStore::new(), Instant::now());
        let missing =
            |rank: u32, patience: Duration| match barrier(&store, "b", Rank(rank), 3, begun + patience)
                .unwrap_err()
            {
                Error::Timeout { missing, .. } => missing,
                other => panic!("{other}"),
            };
        std::thread::scope(|scope| {
            let early = scope.spawn(|| missing(1, Duration::from_millis(100)));
            // It arrives before the other rank decides, and has a much later deadline.
            let late = scope.spawn(|| missing(0, Duration::from_secs(2)));
            assert_eq!(early.join().unwrap(), [Rank(2)]);
            assert_eq!(late.join().unwrap(), [Rank(2)]);
        });
        // A rank that arrives after the end gets the same result.
        assert_eq!(missing(2, Duration::from_secs(20)), [Rank(2)]);
    }

    #[test]
    fn a_watched_wait_ends_with_what_is_found_or_with_the_value_or_at_the_deadline() {
        let (store, rounds) = (MemoryStore::new(), AtomicU32::new(0));
        let fails_at = |round: u32| Watched {
            store: &store,
            check: {
                let rounds = &rounds;
                move || match rounds.fetch_add(1, Ordering::Relaxed) {
                    n if n < round => Ok(()),
                    _ => Err(Error::Transport("the group has failed".into())),
                }
            },
        };
        let found = fails_at(2).get("k", Instant::now() + Duration::from_secs(60)).unwrap_err();
        assert!(found.to_string().contains("the group has failed"), "{found}");
        let error = fails_at(u32::MAX).get("k", Instant::now() + 2 * ROUND).unwrap_err();
        assert!(matches!(error, Error::Timeout { waited, .. } if waited >= 2 * ROUND), "{error}");
        store.set("k", b"v").unwrap();
        assert_eq!(fails_at(u32::MAX).get("k", Instant::now()).unwrap(), b"v");
    }

    #[test]
    fn nobody_writes_what_launchers_write() {
        let store = MemoryStore::new();
        let key = format!("{RESERVED}launcher/1");
        for refused in [store.set(&key, b""), store.add(&key, 1).map(drop)] {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::Invalid(_)) && error.to_string().contains("reserved"), "{error}");
        }
    }

    #[test]
    fn nobody_reaches_the_keys_of_groups_through_the_store_of_programs() {
        let store = ProgramStore(Arc::new(MemoryStore::new()));
        let key = group_key("abort-reason", "world", 0);
        let found = store.get(&key, Instant::now()).map(drop);
        for refused in [found, store.set(&key, b"forged"), store.add(&key, 1).map(drop)] {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::Invalid(_)) && error.to_string().contains("reserved"), "{error}");
        }
    }

    #[test]
    fn the_keys_of_rounds_that_all_have_left_are_removed() {
        let store = MemoryStore::new();
        let enter = |rank: u32| {
            let mut rounds = Rounds::default();
            for _ in 0..20 {
                let until = Instant::now() + LATE;
                let values = rounds.gather(&store, ("barrier", "b"), Rank(rank), 2, 1, until).unwrap();
                assert_eq!(values, [Some(1); 2]);
            }
        };
        std::thread::scope(|scope| {
            let enter = &enter;
            for rank in [0, 1] {
                scope.spawn(move || enter(rank));
            }
        });
        assert_eq!(lock(&store.entries).len(), 4, "those of the last round");
    }

    #[test]
    fn keys_of_groups_fit_the_store_and_differ_as_their_names_do() {
        assert_eq!(group_key("abort-reason", "world", Rank(3)), format!("{OWN}abort-reason/world/3"));
        let name = |last: u32| format!("{}{last}", "ß".repeat(200));
        let (one, other) = (group_key("monitored", &name(1), "1/2"), group_key("monitored", &name(2), "1/2"));
        assert_ne!(one, other);
        for key in [one, other] {
            check(&key, b"").unwrap();
        }
    }
}
