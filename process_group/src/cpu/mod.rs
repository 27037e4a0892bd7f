//! The CPU collectives: between ranks on host memory.
//!
//! A group is a full mesh of links. A call takes a path from the group's [table](crate::paths), makes (or remembers) its program
//! and executes it on the caller's thread; no other thread touches the links. Links are sockets, or go through memory that the
//! ranks [share](shared).

mod compiled;
mod executor;
mod factory;
mod link;
mod negotiate;
mod poll;
pub(crate) mod reduce;
mod shared;
mod spin;
#[cfg(test)]
mod tests;
mod unexpected;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::HashMap;
use rustix::event::{PollFd, PollFlags};

use crate::backend::call::Call;
use crate::backend::{Backend, Completion};
use crate::error::{Error, Result};
use crate::link::mesh::{Liveness, Peers};
use crate::link::security::Channel;
use crate::link::wire::frame::{Header, Kind, MAX_REASON};
use crate::membership::roster::{Cpus, Member};
use crate::paths::host::{Links, Topology, table};
use crate::paths::tuned::TunedRange;
use crate::paths::{Path, PathTable};
use crate::schedule::Algorithm;
use crate::schedule::build::CollectiveSpec;
use crate::types::aligned::AlignedBytes;
use crate::types::backend_kind::BackendKind;
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Composed, Operation};
use crate::types::rank::{LocalRank, Rank};
use compiled::Compiled;
use executor::{Context, History, Progress, Run, Spaces};
pub(crate) use factory::{Factory, demanded};
use link::Link;
use poll::poll_for;
use shared::Doorbell;
use spin::SpinPolicy;

/// Maximum number of remembered programs. A model has few shapes; more than this many come from a sweep over lengths.
const REMEMBERED: usize = 512;

/// Number of bytes of a pipelined piece of a message.
const SEGMENT: usize = 128 << 10;

/// Time for peers to read what leaves no room for a goodbye.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);

/// Settings of a group's links.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The algorithm that the user demands for every operation that supports it.
    pub(crate) demand: Option<Algorithm>,
    /// Ranges of `ryz tune`'s table for groups of this size.
    pub(crate) tuned: Vec<TunedRange>,
    /// Policy for polling before sleeping.
    pub(crate) spin: SpinPolicy,
    /// True if links may go through memory.
    pub(crate) shared_memory: bool,
    /// Checks whether the other ranks' processes respond.
    pub(crate) liveness: Option<Liveness>,
}

/// One rank's end of a group.
pub(crate) struct CpuGroup {
    group: String,
    rank: Rank,
    global_rank: Rank,
    links: Peers<Link>,
    /// The doorbell that wakes this rank, where the links go through memory.
    doorbell: Option<Doorbell>,
    settings: Settings,
    topology: Topology,
    paths: PathTable,
    /// The paths and programs of earlier calls. The keys come from this rank's own calls, so the hash need not resist attacks,
    /// as the slower one of the standard library does.
    programs: HashMap<(CallFingerprint, bool), (Path, Arc<Compiled>)>,
    progress: Progress,
    history: History,
    scratch: AlignedBytes,
}

impl CpuGroup {
    /// Creates the rank's end. `members` are in group order; `rank` is the position of this rank among them.
    pub(crate) fn new(
        group: &str,
        rank: Rank,
        members: &[&Member],
        connections: Peers<Channel>,
        settings: Settings,
    ) -> Self {
        let links = connections.map(|peer, channel| Link::new(members[peer.index()].clone(), channel));
        let topology = Topology::of(members);
        Self {
            group: group.to_owned(),
            rank,
            global_rank: members[rank.index()].rank,
            links,
            doorbell: None,
            paths: table(
                &topology,
                Links::Sockets("ranks without a manager, which are threads, use pairs of sockets"),
                settings.demand,
                &settings.tuned,
            ),
            topology,
            settings,
            programs: HashMap::default(),
            progress: Progress::new(rank.index(), members.len()),
            history: History::default(),
            scratch: AlignedBytes::default(),
        }
    }

    /// Returns the path of a call and its program, made once.
    fn program(&mut self, fingerprint: CallFingerprint, in_place: bool) -> Result<(Path, Arc<Compiled>)> {
        // That it is part of another call makes no difference.
        let fingerprint = CallFingerprint { composed: Composed::NONE, ..fingerprint };
        if let Some((path, compiled)) = self.programs.get(&(fingerprint, in_place)) {
            return Ok((*path, Arc::clone(compiled)));
        }
        if self.programs.len() >= REMEMBERED {
            self.programs.clear();
        }
        let CallFingerprint { operation, dtype, count, .. } = fingerprint;
        let path = self.paths.path(operation, dtype, count);
        let algorithm = path
            .schedule()
            .ok_or_else(|| Error::invalid(format!("{operation} cannot go by `{path}` between ranks")))?;
        // With recursive doubling, a barrier exchanges one byte.
        let count = if operation == Operation::Barrier { 1 } else { count };
        let spec = CollectiveSpec { operation, algorithm, count, in_place };
        let compiled = Arc::new(Compiled::new(spec, self.rank.index(), &self.topology.hosts));
        self.programs.insert((fingerprint, in_place), (path, Arc::clone(&compiled)));
        Ok((path, compiled))
    }
}

/// Connects ranks that are threads of this process, each two by a pair of sockets.
///
/// # Errors
/// Those of the system.
pub(crate) fn threads(group: &str, world_size: usize) -> io::Result<Vec<CpuGroup>> {
    let mut ranks: Vec<Vec<Option<Channel>>> = Vec::new();
    for _ in 0..world_size {
        let mut links = Vec::new();
        for lower in &mut ranks {
            let (one, other) = UnixStream::pair()?;
            lower.push(Some(Channel::clear(one)?));
            links.push(Some(Channel::clear(other)?));
        }
        links.push(None);
        ranks.push(links);
    }
    let cpus = Cpus::current();
    let member = |rank: Rank| Member {
        rank,
        local_rank: LocalRank(rank.0),
        node_rank: 0,
        host: "this process".into(),
        pid: std::process::id(),
        cpus: cpus.clone(),
        data_address: None,
    };
    let members: Vec<Member> = Rank::all(world_size).map(member).collect();
    let members: Vec<&Member> = members.iter().collect();
    let settings = Settings {
        demand: None,
        tuned: Vec::new(),
        spin: SpinPolicy { limit: Duration::ZERO, yields: world_size > cpus.count as usize },
        shared_memory: false,
        liveness: None,
    };
    let groups = Rank::all(world_size).zip(ranks).map(|(rank, links)| {
        let links =
            Peers::complete(rank.index(), links).unwrap_or_else(|_| unreachable!("each two have a link"));
        CpuGroup::new(group, rank, &members, links, settings.clone())
    });
    Ok(groups.collect())
}

impl Backend for CpuGroup {
    fn kind(&self) -> BackendKind {
        BackendKind::Tcp
    }

    fn submit(&mut self, call: Call<'_>) -> Result<Completion> {
        let Call { fingerprint, sequence, deadline, in_place, input, output, interrupt, .. } = call;
        let operation = fingerprint.operation;
        let (path, compiled) = self.program(fingerprint, in_place)?;
        let mut token = [0u8];
        let mut output = output;
        let output: &mut [u8] = match (&mut output, operation) {
            (_, Operation::Barrier) => &mut token,
            (Some(view), _) => view.host()?,
            (None, _) => &mut [],
        };
        let scratch = self.scratch.first(compiled.scratch * fingerprint.dtype.size());
        if !operation.is_point_to_point() {
            self.history.push(sequence, fingerprint);
        }
        let run = Run {
            context: Context {
                group: &self.group,
                rank: self.rank,
                global_rank: self.global_rank,
                spin: self.settings.spin,
                doorbell: self.doorbell.as_ref(),
                history: &self.history,
                liveness: self.settings.liveness.as_ref(),
                interrupt: interrupt.as_deref(),
            },
            links: &mut self.links,
            compiled: &compiled,
            fingerprint,
            sequence,
            deadline,
            spaces: Spaces { input: input.map(|v| v.host()).transpose()?, output, scratch },
            progress: &mut self.progress,
        };
        run.run()?;
        Ok(Completion { path, enqueued: false, captured: false, waited: self.progress.waited() })
    }

    fn paths(&self) -> PathTable {
        self.paths.clone()
    }

    fn force(&mut self, path: Option<Path>) -> Result<()> {
        self.paths.force(path)?;
        self.programs.clear();
        Ok(())
    }

    fn abort(&mut self, why: &Error) {
        for link in self.links.iter_mut() {
            abort(link, self.global_rank, why);
        }
    }
}

/// Tells the members that were reached why the group is not made. `me` is this rank's global rank.
fn decline(me: Rank, members: &[&Member], connections: Vec<Option<Channel>>, why: &Error) {
    for (member, connection) in members.iter().zip(connections) {
        if let Some(channel) = connection {
            abort(&mut Link::new((*member).clone(), channel), me, why);
        }
    }
}

/// Tells a peer that this rank gives up.
fn abort(link: &mut Link, me: Rank, why: &Error) {
    let (origin, reason) = match why {
        Error::PeerAborted { rank, reason } => (*rank, reason.clone()),
        other => (me, other.to_string()),
    };
    let end = reason.floor_char_boundary(MAX_REASON);
    let (header, reason) = (control(Kind::Abort, origin, end), &reason.as_bytes()[..end]);
    link.say_on_socket(&header, reason);
    if link.mid_frame {
        // The current frame can neither be finished nor interrupted: only the end of the link can tell the peer.
        link.cut();
        return;
    }
    link.queue_control(&header, reason);
    if !link.flush_control() {
        link.cut();
    }
}

fn control(kind: Kind, rank: Rank, length: usize) -> Header {
    let fingerprint = CallFingerprint::new(Operation::Barrier, DType::U8, 0);
    Header { kind, fingerprint, algorithm: Algorithm::Direct, sequence: 0, length, rank }
}

impl Drop for CpuGroup {
    fn drop(&mut self) {
        let (goodbye, until) =
            (control(Kind::Goodbye, self.global_rank, 0), Instant::now() + GOODBYE_TIMEOUT);
        for link in self.links.iter_mut().filter(|l| l.closed.is_none()) {
            link.say_on_socket(&goodbye, &[]);
            link.queue_control(&goodbye, &[]);
            // Without it, the peer would conclude that this rank has failed. Where links are shared, the socket has it.
            while !link.flush_control() && !link.is_shared() && !link.mid_frame && link.closed.is_none() {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero()
                    || poll_for(&mut [PollFd::new(link.socket(), PollFlags::OUT)], left).is_err()
                {
                    break;
                }
            }
        }
    }
}
