//! Ranks as threads of one process: every rank posts its contribution to a shared table and computes its own result.
//!
//! It shares only the reduction of slices with the TCP backend, so that each checks the other.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::call::{Call, Interrupt};
use crate::backend::{Backend, Completion};
use crate::cpu::reduce::{self, Source};
use crate::error::{Error, Result};
use crate::factory::{AnyBackend, BackendFactory, GroupSpec, ProbeContext};
use crate::membership::capability::Capability;
use crate::paths::{Path, PathTable};
use crate::types::backend_kind::BackendKind;
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Operation, ReduceOp};
use crate::types::rank::Rank;
use crate::types::sync::lock;

/// Time for which a rank that timed out waits for the reports of the other ranks; all ranks share one clock here.
const GRACE: Duration = Duration::from_millis(50);

/// The memory that ranks of one process share. Clones refer to the same hub.
#[derive(Clone, Default)]
pub(crate) struct LoopbackHub {
    tables: Tables,
}

/// The table of each group's members, kept while one of them is present or still expected.
type Tables = Arc<Mutex<HashMap<String, Arc<Table>>>>;

impl LoopbackHub {
    /// Creates a hub for ranks that get clones of it.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Joins the table of a group.
    pub(crate) fn join(&self, group: &str, rank: Rank, members: &[Rank]) -> Loopback {
        let mut tables = lock(&self.tables);
        let table = Arc::clone(tables.entry(group.to_owned()).or_default());
        drop(tables);
        let tables = Arc::clone(&self.tables);
        Loopback { group: group.to_owned(), tables, table, rank, members: members.to_vec() }
    }
}

#[derive(Default)]
struct Table {
    seats: Mutex<Seats>,
    changed: Condvar,
}

#[derive(Default)]
struct Seats {
    calls: HashMap<u64, Round>,
    messages: HashMap<(Rank, Rank, u64), Post>,
    aborted: Option<(Rank, String)>,
    left: Vec<Rank>,
}

#[derive(Default)]
struct Round {
    posts: Vec<Option<Post>>,
    finished: usize,
}

#[derive(Clone)]
struct Post {
    fingerprint: CallFingerprint,
    data: Arc<[u8]>,
}

/// One rank's end.
pub(crate) struct Loopback {
    group: String,
    tables: Tables,
    table: Arc<Table>,
    rank: Rank,
    /// Global ranks of the members, for errors.
    members: Vec<Rank>,
}

impl Loopback {
    fn name(&self, rank: Rank) -> Rank {
        self.members[rank.index()]
    }

    /// Waits until `ready` returns a value, a rank aborts, or the deadline passes; then `missing` names the absent ranks.
    fn wait<R>(
        &self,
        call: &Call<'_>,
        mut ready: impl FnMut(&mut Seats) -> Result<Option<R>>,
        missing: impl Fn(&Seats) -> Vec<Rank>,
    ) -> Result<R> {
        let started = Instant::now();
        let mut deadline = call.deadline;
        let mut seats = lock(&self.table.seats);
        loop {
            // A result that exists counts even if a rank has given up or left since.
            if let Some(result) = ready(&mut seats)? {
                return Ok(result);
            }
            if let Some((rank, reason)) = &seats.aborted {
                return Err(Error::PeerAborted { rank: *rank, reason: reason.clone() });
            }
            if let Some(interrupt) = &call.interrupt {
                interrupt.check()?;
            }
            let absent = missing(&seats);
            if let Some(&gone) = seats.left.iter().find(|r| absent.contains(r)) {
                return Err(Error::PeerLost {
                    rank: self.name(gone),
                    host: "this process".into(),
                    pid: std::process::id(),
                    during: call.fingerprint.to_string(),
                    detail: "its thread has dropped the group".into(),
                });
            }
            let now = Instant::now();
            if now >= deadline {
                if deadline == call.deadline {
                    // A rank that arrived at the same moment may be about to post.
                    deadline += GRACE;
                } else {
                    return Err(Error::Timeout {
                        what: format!("{} in group `{}`", call.fingerprint, self.group),
                        waited: started.elapsed(),
                        missing: absent.into_iter().map(|r| self.name(r)).collect(),
                    });
                }
            }
            let left = deadline.saturating_duration_since(now).min(Interrupt::LOOK_EVERY);
            seats = self.table.changed.wait_timeout(seats, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn send(&self, call: &Call<'_>, to: Rank) -> Result<()> {
        let data = Arc::from(call.input.map_or(Ok(&[][..]), |v| v.host())?);
        let post = Post { fingerprint: call.fingerprint, data };
        let mut seats = lock(&self.table.seats);
        seats.messages.insert((self.rank, to, call.sequence), post);
        self.table.changed.notify_all();
        Ok(())
    }

    fn receive(&self, call: &mut Call<'_>, from: Rank) -> Result<()> {
        let key = (from, self.rank, call.sequence);
        let post = self.wait(call, |s| Ok(s.messages.remove(&key)), |_| vec![from])?;
        // Sender and receiver name the message differently; type and length must agree.
        if (post.fingerprint.dtype, post.fingerprint.count)
            != (call.fingerprint.dtype, call.fingerprint.count)
        {
            return Err(self.mismatch(call, from, &post.fingerprint));
        }
        if let Some(output) = &mut call.output {
            output.host()?.copy_from_slice(&post.data);
        }
        Ok(())
    }

    fn check(&self, call: &Call<'_>, peer: Rank, theirs: &CallFingerprint) -> Result<()> {
        if *theirs == call.fingerprint {
            return Ok(());
        }
        Err(self.mismatch(call, peer, theirs))
    }

    fn mismatch(&self, call: &Call<'_>, peer: Rank, theirs: &CallFingerprint) -> Error {
        let (me, peer) = (self.name(self.rank), self.name(peer));
        Error::mismatch(&self.group, call.sequence, (me, &call.fingerprint), (peer, theirs))
    }

    fn collective(&self, call: &mut Call<'_>) -> Result<()> {
        let (sequence, world_size) = (call.sequence, self.members.len());
        let post = Post { fingerprint: call.fingerprint, data: Arc::from(contribution(call, self.rank)?) };
        {
            let mut seats = lock(&self.table.seats);
            let round = seats.calls.entry(sequence).or_default();
            round.posts.resize(world_size, None);
            round.posts[self.rank.index()] = Some(post);
            self.table.changed.notify_all();
        }
        let absent = |seats: &Seats| {
            let round = seats.calls.get(&sequence);
            Rank::all(world_size)
                .filter(|r| round.is_none_or(|round| round.posts[r.index()].is_none()))
                .collect()
        };
        let posts: Vec<Post> = self.wait(
            call,
            |seats| {
                let Some(round) = seats.calls.get_mut(&sequence) else { return Ok(None) };
                for (peer, post) in Rank::all(world_size).zip(&round.posts) {
                    if let Some(post) = post {
                        self.check(call, peer, &post.fingerprint)?;
                    }
                }
                if round.posts.iter().any(Option::is_none) {
                    return Ok(None);
                }
                let posts = round.posts.iter().flatten().cloned().collect();
                round.finished += 1;
                if round.finished == world_size {
                    seats.calls.remove(&sequence);
                }
                Ok(Some(posts))
            },
            absent,
        )?;
        let data: Vec<&[u8]> = posts.iter().map(|p| &*p.data).collect();
        finish(call, self.rank, &data)
    }
}

/// Returns the contribution that a rank posts.
fn contribution<'c>(call: &'c Call<'_>, rank: Rank) -> Result<&'c [u8]> {
    let whole = match (call.input, &call.output) {
        (Some(input), _) => input.host()?,
        (None, Some(output)) => output.as_view().host()?,
        (None, None) => &[],
    };
    let in_place = call.in_place;
    let chunk = call.fingerprint.count * call.fingerprint.dtype.size();
    Ok(match call.fingerprint.operation {
        Operation::AllGather | Operation::Gather { .. } if in_place => {
            &whole[rank.index() * chunk..][..chunk]
        }
        Operation::Broadcast { root } | Operation::Scatter { root } if root != rank => &[],
        Operation::Barrier => &[],
        _ => whole,
    })
}

/// Computes a rank's result from the contributions.
fn finish(call: &mut Call<'_>, rank: Rank, data: &[&[u8]]) -> Result<()> {
    let in_place = call.in_place;
    let CallFingerprint { operation, dtype, count } = call.fingerprint;
    let chunk = count * dtype.size();
    let Some(output) = &mut call.output else { return Ok(()) };
    let output = output.host()?;
    let mine = rank.index() * chunk..(rank.index() + 1) * chunk;
    match operation {
        Operation::AllReduce(op) => reduce(dtype, op, output, data),
        Operation::Reduce { op, root } if root == rank => reduce(dtype, op, output, data),
        Operation::Broadcast { root } => output.copy_from_slice(data[root.index()]),
        Operation::AllGather => output.copy_from_slice(&data.concat()),
        Operation::Gather { root } if root == rank => output.copy_from_slice(&data.concat()),
        Operation::ReduceScatter(op) => {
            let chunks: Vec<&[u8]> = data.iter().map(|d| &d[mine.clone()]).collect();
            reduce(dtype, op, if in_place { &mut output[mine] } else { output }, &chunks);
        }
        Operation::Scatter { root } => {
            let from = &data[root.index()][mine.clone()];
            if in_place { &mut output[mine] } else { output }.copy_from_slice(from);
        }
        Operation::AllToAll => {
            let chunks: Vec<&[u8]> = data.iter().map(|d| &d[mine.clone()]).collect();
            output.copy_from_slice(&chunks.concat());
        }
        _ => {}
    }
    Ok(())
}

fn reduce(dtype: DType, op: ReduceOp, into: &mut [u8], data: &[&[u8]]) {
    let sources: Vec<_> = data.iter().map(|d| Source::Bytes(d)).collect();
    let divisor = (op == ReduceOp::Avg).then_some(data.len());
    reduce::reduce(dtype, op, into, &sources, divisor);
}

impl Backend for Loopback {
    fn kind(&self) -> BackendKind {
        BackendKind::Loopback
    }

    fn submit(&mut self, mut call: Call<'_>) -> Result<Completion> {
        match call.fingerprint.operation {
            Operation::Send { to } => self.send(&call, to)?,
            Operation::Recv { from } => self.receive(&mut call, from)?,
            _ => self.collective(&mut call)?,
        }
        Ok(Completion { path: Path::Loopback, enqueued: false, captured: false, waited: Duration::ZERO })
    }

    fn paths(&self) -> PathTable {
        PathTable::single(Path::Loopback, self.members.len(), "the ranks are threads of one process")
    }

    fn force(&mut self, path: Option<Path>) -> Result<()> {
        self.paths().force(path)
    }

    fn abort(&mut self, why: &Error) {
        let mut seats = lock(&self.table.seats);
        if seats.aborted.is_none() {
            seats.aborted = Some((self.name(self.rank), why.to_string()));
        }
        self.table.changed.notify_all();
    }
}

/// Makes the groups of ranks that are threads of this process.
#[derive(Default)]
pub(crate) struct Factory {
    hub: Option<LoopbackHub>,
}

impl BackendFactory for Factory {
    fn kind(&self) -> BackendKind {
        BackendKind::Loopback
    }

    fn needs_mesh(&self) -> bool {
        false
    }

    fn probe(&mut self, context: &ProbeContext<'_>) -> Capability {
        self.hub = context.in_process.as_ref().map(|shared| LoopbackHub::clone(&shared.get()));
        match self.hub {
            Some(_) => Capability::usable(BackendKind::Loopback),
            None => Capability::unusable(
                BackendKind::Loopback,
                "ranks share no memory",
                "ranks are processes of their own and share no memory",
            ),
        }
    }

    fn connect(&mut self, group: &GroupSpec<'_>) -> Result<AnyBackend> {
        let Some(hub) = &self.hub else {
            return Err(Error::Rendezvous("the loopback backend was selected without shared memory".into()));
        };
        let members: Vec<Rank> = group.members.iter().map(|member| member.rank).collect();
        Ok(AnyBackend::Host(Box::new(hub.join(group.name, group.rank, &members))))
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        // No rank joins while the last one removes the table.
        let mut tables = lock(&self.tables);
        let mut seats = lock(&self.table.seats);
        seats.left.push(self.rank);
        self.table.changed.notify_all();
        if seats.left.len() == self.members.len() {
            tables.remove(&self.group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_goes_when_all_its_ranks_have_gone() {
        let hub = LoopbackHub::new();
        let members: Vec<Rank> = Rank::all(2).collect();
        let table = |rank| hub.join("pair", rank, &members);
        drop(table(Rank(0)));
        let last = table(Rank(1));
        assert_eq!(
            last.tables.lock().unwrap().len(),
            1,
            "its member that left is known to the one that is there"
        );
        drop(last);
        assert!(hub.tables.lock().unwrap().is_empty());
    }
}
