//! The flight recorder: the newest calls of each group of a rank, kept in memory, and written to a file when a group fails.
//!
//! No lock of a record is held while a call waits: a rank can be asked for its record while its calls are blocked.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use ryzanstein_config::file;

use crate::error::{Error, Result};
use crate::membership::roster::Roster;
use crate::observe::activity::GroupActivity;
use crate::observe::call_history::unix_ns;
use crate::observe::profile::Profile;
use crate::observe::record::FlightRecord;
use crate::stream::Status;
use crate::types::rank::Rank;
use crate::types::sync::lock;

/// Time for which a rank whose group has failed waits until its record is written.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of groups that are shown after they have failed and ended.
const MOST_FAILED: usize = 16;

/// One rank's flight recorder, from [`ProcessGroupManager::flight_recorder`](crate::ProcessGroupManager::flight_recorder). May be
/// used from any thread at any time; it never waits for a call.
#[derive(Clone, Debug)]
pub struct FlightRecorder(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The common first part of every record.
    head: FlightRecord,
    /// The folder for the record of a failed group.
    folder: Option<PathBuf>,
    groups: Mutex<Vec<Shown>>,
    /// Locked while a file is written: one at a time.
    writing: Mutex<()>,
}

/// A group in the records.
#[derive(Clone)]
struct Shown {
    profile: Arc<Profile>,
    /// The status of a group on a GPU.
    status: Option<Arc<Status>>,
}

impl std::fmt::Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shown").field("profile", &self.profile).finish_non_exhaustive()
    }
}

impl Shown {
    fn activity(&self, now: Instant) -> GroupActivity {
        let activity = self.profile.activity(now);
        let pending = self.status.as_ref().and_then(|status| status.pending());
        match pending {
            Some(pending) => activity.with_pending(&pending, now),
            None => activity,
        }
    }
}

impl FlightRecorder {
    pub(crate) fn new(rank: Rank, roster: &Roster, folder: Option<PathBuf>) -> Self {
        let (first, me) = (&roster.members[0], &roster.members[rank.index()]);
        let head = FlightRecord {
            job: format!("{}:{} epoch {}", first.host, first.pid, roster.epoch),
            rank,
            world_size: roster.world_size(),
            host: me.host.clone(),
            pid: me.pid,
            dumped_ns: 0,
            groups: Vec::new(),
        };
        Self(Arc::new(Inner { head, folder, groups: Mutex::default(), writing: Mutex::default() }))
    }

    /// Shows a group in records while it exists, and the newest [`MOST_FAILED`] of those that have failed.
    pub(crate) fn add(&self, profile: &Arc<Profile>, status: Option<&Arc<Status>>) {
        self.groups();
        lock(&self.0.groups).push(Shown { profile: Arc::clone(profile), status: status.cloned() });
    }

    fn groups(&self) -> Vec<Shown> {
        let mut groups = lock(&self.0.groups);
        groups.retain(|shown| !shown.profile.has_ended() || shown.profile.has_failed());
        let has_ended = |shown: &Shown| shown.profile.has_ended();
        let too_many = groups.iter().filter(|shown| has_ended(shown)).count().saturating_sub(MOST_FAILED);
        for _ in 0..too_many {
            // The oldest groups come first.
            if let Some(oldest) = groups.iter().position(has_ended) {
                groups.remove(oldest).profile.forget_newest();
            }
        }
        groups.clone()
    }

    /// Returns the current activity of each group. It is cheaper than [`record`](Self::record): it reads the newest calls only.
    pub fn activity(&self) -> Vec<GroupActivity> {
        let now = Instant::now();
        self.groups().iter().map(|shown| shown.activity(now)).collect()
    }

    /// Returns a copy of the present records.
    pub fn record(&self) -> FlightRecord {
        let groups = self.groups().into_iter().filter_map(|Shown { profile, .. }| {
            let record = profile.flight_record();
            // A group that has ended meanwhile has forgotten its calls.
            (!profile.has_ended() || profile.has_failed()).then_some(record)
        });
        let groups = groups.collect();
        FlightRecord { dumped_ns: unix_ns(Instant::now()), groups, ..self.0.head.clone() }
    }

    /// Returns the folder of `profile.trace_dir`, to which a record is written when a group fails.
    pub fn folder(&self) -> Option<&Path> {
        self.0.folder.as_deref()
    }

    /// Writes a record to `rank-R.json` in a folder, which is created if necessary. Replaces the file atomically: no reader sees
    /// half of it. Returns its path.
    ///
    /// # Errors
    /// [`Error::System`] with the path that cannot be written.
    pub fn write(&self, folder: &Path) -> Result<PathBuf> {
        let _one_at_a_time = lock(&self.0.writing);
        let path = folder.join(format!("rank-{}.json", self.0.head.rank));
        let write = || {
            fs::create_dir_all(folder)?;
            file::replace(&path, &serde_json::to_vec(&self.record())?)
        };
        write().map_err(Error::system(format!("cannot write {}", path.display())))?;
        Ok(path)
    }

    /// Writes a record to `rank-R.json` in the folder of `profile.trace_dir`, if there is one, after a failure. Another thread writes
    /// it, and this waits a second at most: a disk that hangs must not keep the error from the caller. Logs an error to write.
    pub fn failed(&self) {
        let Some(folder) = self.folder().map(Path::to_owned) else { return };
        let (recorder, rank) = (self.clone(), self.0.head.rank.0);
        let (sender, written) = mpsc::channel();
        let write = move || {
            let _ = sender.send(recorder.write(&folder));
        };
        let thread = std::thread::Builder::new().name("ryz-record".into()).spawn(write);
        match thread.map(|_| written.recv_timeout(PATIENCE)) {
            Ok(Ok(Ok(path))) => tracing::debug!(rank, path = %path.display(), "wrote the flight record"),
            Ok(Ok(Err(error))) => tracing::warn!(rank, %error, "no flight record"),
            Ok(Err(_)) => tracing::warn!(rank, "no flight record: the disk took longer than {PATIENCE:?}"),
            Err(error) => tracing::warn!(rank, %error, "no flight record"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use ryzanstein_config::{BackendChoice, Config};

    use super::*;
    use crate::MemoryRendezvous;
    use crate::Operation;
    use crate::ProcessGroupManager;
    use crate::ReduceOp;
    use crate::observe::record::Outcome;

    const LONG: Duration = Duration::from_secs(60);

    fn config(folder: Option<&Path>) -> Config {
        let mut config = Config::default();
        config.process_group.backend = BackendChoice::Tcp;
        config.profile.trace_dir = folder.map(Path::to_owned);
        config
    }

    /// Runs two ranks as threads.
    fn together(config: &Config, rank: impl Fn(ProcessGroupManager) + Sync) {
        std::thread::scope(|scope| {
            for rendezvous in MemoryRendezvous::new(2) {
                let rank = &rank;
                scope.spawn(move || rank(ProcessGroupManager::initialize(config, &rendezvous).unwrap()));
            }
        });
    }

    #[test]
    fn a_rank_whose_call_is_blocked_can_be_asked_for_its_record() {
        let (sender, receiver) = mpsc::channel::<FlightRecorder>();
        let receiver = Mutex::new(receiver);
        together(&config(None), |mut manager| {
            if manager.rank().0 == 0 {
                sender.send(manager.flight_recorder()).unwrap();
            } else {
                let recorder = lock(&receiver).recv_timeout(LONG).unwrap();
                let until = Instant::now() + LONG;
                let blocked = loop {
                    let world = recorder.record().groups.remove(0);
                    if let Some(call) = world.calls.last()
                        && call.outcome == Outcome::InProgress
                        && call.fingerprint.operation == Operation::AllReduce(ReduceOp::Max)
                    {
                        break call.clone();
                    }
                    assert!(Instant::now() < until, "rank 0 waits for rank 1: {world:?}");
                    std::thread::yield_now();
                };
                assert_eq!((blocked.fingerprint.count, blocked.calls, blocked.returned_ns), (3, 1, None));
                let world = recorder.activity().remove(0);
                let current = world.current.expect("a call that has not returned");
                assert_eq!((current.number, world.ended), (blocked.number, Some(blocked.number - 1)));
                assert_eq!((world.begun, world.operation), (Some(current.number), Some(current.operation)));
            }
            manager.world().all_reduce(&mut [1.0f32; 3], ReduceOp::Max).unwrap();
            let world = manager.flight_recorder().record().groups.remove(0);
            assert_eq!(world.members, [Rank(0), Rank(1)]);
            let last = world.calls.last().unwrap();
            assert!(last.outcome == Outcome::Done && last.path.is_some(), "{last:?}");
            let world = manager.flight_recorder().activity().remove(0);
            assert_eq!((world.current, world.begun), (None, world.ended));
            assert_eq!(world.recent.expect("one call was timed").calls, 1, "the self-check is not counted");
            manager.finalize().unwrap();
        });
    }

    #[test]
    fn each_rank_of_a_group_that_fails_leaves_a_file_that_only_its_user_reads() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("made/when/needed");
        together(&config(Some(&inside)), |mut manager| {
            let count = if manager.rank().0 == 0 { 3 } else { 4 };
            let error = manager.world().all_reduce(&mut vec![1.0f32; count], ReduceOp::Sum).unwrap_err();
            let path = inside.join(format!("rank-{}.json", manager.rank()));
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            let record: FlightRecord = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            assert_eq!((record.rank, record.world_size), (manager.rank(), 2));
            let world = &record.groups[0];
            assert_eq!(world.failure.as_ref().unwrap().error, error.to_string());
            let last = world.calls.last().unwrap();
            assert_eq!((last.fingerprint.count, last.outcome), (count, Outcome::Failed));
        });
        assert_eq!(fs::read_dir(&inside).unwrap().count(), 2, "nothing else is left");
    }

    #[test]
    fn a_rank_that_panics_leaves_the_record_of_all_its_groups() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            let config = config(Some(folder.path()));
            let start = |rendezvous| {
                let config = config.clone();
                scope.spawn(move || {
                    let _manager = ProcessGroupManager::initialize(&config, &rendezvous).unwrap();
                    panic!("on purpose");
                })
            };
            let ranks: Vec<_> = MemoryRendezvous::new(2).into_iter().map(start).collect();
            for rank in ranks {
                assert!(rank.join().is_err());
            }
        });
        let record: FlightRecord =
            serde_json::from_slice(&fs::read(folder.path().join("rank-0.json")).unwrap()).unwrap();
        assert_eq!(record.groups[0].name, "world");
        assert!(record.groups.iter().all(|group| group.failure.is_some()), "{record:?}");
    }

    #[test]
    fn the_newest_groups_that_have_failed_stay_in_records_with_their_calls() {
        together(&config(None), |mut manager| {
            let count = 2 + manager.rank().index();
            let mut names = Vec::new();
            for _ in 0..=MOST_FAILED {
                let mut group = manager.new_group(&[Rank(0), Rank(1)]).unwrap().unwrap();
                names.push(group.name().to_owned());
                group.all_reduce(&mut vec![1.0f32; count], ReduceOp::Sum).unwrap_err();
            }
            let record = manager.flight_recorder().record();
            let failed: Vec<_> = record.groups.iter().filter(|group| group.failure.is_some()).collect();
            assert_eq!(
                failed.iter().map(|group| &group.name).collect::<Vec<_>>(),
                Vec::from_iter(&names[1..])
            );
            for group in failed {
                let last = group.calls.last().expect("its call");
                assert_eq!((last.fingerprint.count, last.outcome), (count, Outcome::Failed));
            }
            manager.finalize().unwrap();
        });
    }

    #[test]
    fn a_group_that_is_dropped_is_in_no_record() {
        together(&config(None), |mut manager| {
            let recorder = manager.flight_recorder();
            let before = recorder.record().groups.len();
            let group = manager.new_group(&[Rank(0), Rank(1)]).unwrap().unwrap();
            assert_eq!(recorder.record().groups.len(), before + 1);
            drop(group);
            assert_eq!(recorder.record().groups.len(), before);
            manager.finalize().unwrap();
        });
    }
}
