//! A communicator from its birth to its end.

use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::handles::Kind::{Calls, Root, Stem};
use super::links::{Links, Word};
use super::shared::{HEARD, Request, Shared, VERDICT, lock};
use super::watch;
use crate::device::nccl::sys::ncclUniqueId;
use crate::device::nccl::{id_bytes, id_from_bytes};
use crate::error::{Error, Result};
use crate::foreign;
use crate::rank::Rank;
use crate::store::{self, Store, Watched, group_key};

/// How a communicator comes to be.
pub(crate) enum Birth<'a> {
    /// From a fresh unique id, which the group's rank 0 leaves in the store.
    Id(&'a dyn Store),
    /// Split off another, whose members all do so at the same time, behind [`Communicator::gather`]. Members of one colour
    /// are together, in the order of the key that follows it. The member of a group of one takes part, and gets none.
    Split(&'a Communicator, u32, u32),
}

/// A communicator with its watcher.
pub(crate) struct Communicator {
    pub(super) shared: Arc<Shared>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

impl Communicator {
    /// Makes it, or gives up at the deadline, when a member is lost, or when NCCL refuses.
    pub(super) fn open(shared: Shared, links: Links, birth: &Birth<'_>, deadline: Instant) -> Result<Self> {
        let shared = Arc::new(shared);
        // Watches from here on: a member that dies during the start is noticed too.
        let watcher = Mutex::new(Some(watch::spawn(&shared, links)?));
        let communicator = Self { shared, watcher };
        if let Err(error) = communicator.init(birth, deadline) {
            // Tell the others why, while the watcher is there to do it.
            communicator.abort(&error);
            return Err(error);
        }
        Ok(communicator)
    }

    fn init(&self, birth: &Birth<'_>, deadline: Instant) -> Result<()> {
        let shared = &*self.shared;
        let (started, key) = (Instant::now(), shared.position as u32);
        match birth {
            Birth::Split(parent, ..) if shared.members.len() == 1 => {
                return shared.split(&parent.shared, (Root, Stem), None, deadline);
            }
            Birth::Id(_) if shared.members.len() == 1 => return Ok(()),
            Birth::Id(store) => {
                shared.make_root(self.unique_id(*store, deadline)?, deadline)?;
                shared.split(shared, (Root, Stem), Some((0, key)), deadline)?;
            }
            Birth::Split(parent, colour, key) => {
                shared.split(&parent.shared, (Root, Stem), Some((*colour, *key)), deadline)?;
            }
        }
        let stem = started.elapsed();
        shared.split(shared, (Stem, Calls), Some((0, key)), deadline)?;
        let all = started.elapsed();
        tracing::debug!(group = shared.group, ?stem, ?all, "NCCL has made a communicator");
        Ok(())
    }

    fn unique_id(&self, store: &dyn Store, deadline: Instant) -> Result<ncclUniqueId> {
        let shared = &*self.shared;
        let key = group_key("nccl", &shared.group, "id");
        if shared.position == 0 {
            let mut id = id_from_bytes([0; 128]);
            // SAFETY: the pointer is to a live id.
            let code = unsafe { foreign!(nccl, shared.nccl.ncclGetUniqueId(&raw mut id)) };
            if code != 0 {
                return Err(shared.error("ncclGetUniqueId", code, 0));
            }
            store.set(&key, &id_bytes(&id))?;
            return Ok(id);
        }
        let started = Instant::now();
        // The watcher may hear meanwhile that a member is lost.
        let watched = Watched { store, check: || shared.check() };
        let bytes = watched.get(&key, deadline).map_err(|error| match error {
            Error::Timeout { .. } => shared.check().err().unwrap_or_else(|| Error::Timeout {
                what: format!("waiting for the NCCL id of group `{}`", shared.group),
                waited: started.elapsed(),
                missing: vec![shared.members[0].rank],
            }),
            other => other,
        })?;
        let id = <[u8; 128]>::try_from(bytes.as_slice())
            .map_err(|_| Error::Rendezvous(format!("the NCCL id in the store has {} bytes", bytes.len())))?;
        Ok(id_from_bytes(id))
    }

    /// Errors once it has failed.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared.check()
    }

    /// Waits until all members have come to split groups of this kind off it; `group` is this rank's.
    ///
    /// NCCL splits together with all of them, and cannot say whom it waits for. To know it costs a few small messages to the
    /// store, beside the tenths of a second that a split takes.
    pub(crate) fn gather(&self, store: &dyn Store, kind: &str, group: &str, deadline: Instant) -> Result<()> {
        let shared = &*self.shared;
        let ranks: Vec<Rank> = shared.members.iter().map(|member| member.rank).collect();
        // The watcher may hear meanwhile that one is lost, or gives up.
        let watched = Watched { store, check: || shared.check() };
        gather(&watched, (&shared.group, &ranks, shared.position), kind, group, deadline)
            .map_err(|error| shared.check().err().unwrap_or(error))
    }

    /// Tells the others why this rank gives up, and ends the communicator, from the watcher's thread. Never blocks.
    pub(super) fn abort(&self, why: &Error) {
        if !self.shared.has_failed() {
            lock(&self.shared.request).get_or_insert(Request::Abort(why.clone()));
        }
    }

    /// If there is a request to give up: waits until the watcher has done it.
    fn await_failure(&self) {
        let until = Instant::now() + VERDICT;
        while lock(&self.shared.request).is_some() && !self.shared.has_failed() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends it, in good order unless it has failed. Whoever holds it still finds it gone.
    pub(super) fn close(&self) {
        let Some(watcher) = lock(&self.watcher).take() else { return };
        // A request that the watcher has not done yet: the others must still be told, and the end is in its hands then.
        self.await_failure();
        self.shared.leaves.store(true, Ordering::Release);
        let is_over = !self.shared.has_failed() && self.shared.end();
        let is_cut_off = !self.shared.calls_are_over.load(Ordering::Acquire);
        if is_cut_off {
            // What is cut off now may look done to the others: they must know before.
            self.abort(&Error::Transport("it leaves the group in the middle of a call".into()));
            self.await_failure();
        }
        self.shared.stop.store(true, Ordering::Release);
        let _ = watcher.join();
        if !is_over || is_cut_off {
            // Of one that has failed, something may have been made after it was given up.
            self.shared.retire();
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.close();
    }
}

/// Tells those who were reached why this rank gives up a group that could not be connected: they would see a lost rank
/// otherwise, once they listen.
pub(crate) fn decline(streams: Vec<Option<TcpStream>>, why: &Error) {
    let mut links = Links::new(streams);
    links.tell_all(&Word::Aborted(why.to_string()));
    links.close(HEARD);
}

/// Waits until all ranks of `parent`, this one being at `position`, have come to split groups of this kind off it.
fn gather(
    store: &dyn Store,
    (parent, ranks, position): (&str, &[Rank], usize),
    kind: &str,
    group: &str,
    deadline: Instant,
) -> Result<()> {
    let started = Instant::now();
    let key = group_key("nccl", parent, format_args!("split/{kind}"));
    let words = store::meet(store, &key, Rank(position as u32), ranks.len(), 0, deadline)?;
    let absent = ranks.iter().zip(words).filter(|(_, word)| word.is_none());
    let missing: Vec<Rank> = absent.map(|(rank, _)| *rank).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let what = format!("making group `{group}`, for which all ranks of group `{parent}` split it,");
    Err(Error::Timeout { what, waited: started.elapsed(), missing })
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::super::links::Heard;
    use super::*;
    use crate::store::MemoryStore;
    use crate::testing::LATE;

    #[test]
    fn whoever_was_reached_by_a_rank_that_cannot_connect_all_hears_why() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mine = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let theirs = listener.accept().unwrap().0;
        for stream in [&mine, &theirs] {
            stream.set_nonblocking(true).unwrap();
        }
        let (what, waited) = ("connecting group `g`".into(), Duration::from_secs(3));
        let error = Error::Timeout { what, waited, missing: vec![Rank(2)] };
        let mut links = Links::new(vec![None, Some(theirs)]);
        // Already said when the other gives up, and not read.
        links.tell_all(&Word::Hello);
        decline(vec![Some(mine), None, None], &error);
        let heard = links.listen(LATE);
        assert_eq!(heard[0], (1, Heard::Said(Word::Aborted(error.to_string()))), "{heard:?}");
    }

    /// What each of these ranks of a world of four comes to, of which the first two are a group and the others another.
    fn come(there: &[u32], patience: Duration) -> Vec<Result<()>> {
        let (store, world) = (MemoryStore::new(), Rank::all(4).collect::<Vec<_>>());
        let come = |rank: u32| {
            let group = if rank < 2 { "tensor_parallel[0..1]" } else { "tensor_parallel[2..3]" };
            let deadline = Instant::now() + patience;
            gather(&store, ("world", &world, rank as usize), "tensor_parallel", group, deadline)
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = there.iter().map(|rank| scope.spawn(|| come(*rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn whoever_does_not_come_to_a_split_is_named_to_all_others_with_the_group_that_each_makes() {
        assert!(come(&[3, 1, 0, 2], LATE).iter().all(Result::is_ok));
        for there in [[0, 1, 3], [3, 1, 2]] {
            let missing = (0..4).find(|rank| !there.contains(rank)).unwrap();
            for (rank, outcome) in there.iter().zip(come(&there, Duration::from_secs(1))) {
                let error = outcome.unwrap_err().to_string();
                let made = if *rank < 2 { "`tensor_parallel[0..1]`" } else { "`tensor_parallel[2..3]`" };
                assert!(error.contains(made) && error.contains("`world`"), "{error}");
                assert!(error.ends_with(&format!("rank {missing} is not there")), "{error}");
            }
        }
    }
}
