//! Our own collectives over TCP.
//!
//! A group is a full mesh of links. A call picks an algorithm, makes (or remembers) its program and runs it on the
//! caller's thread; nothing else touches the links.
//!
//! Between ranks of one host, large payloads need not go through the links at all: see [`cross_memory`].

mod compiled;
mod cross_memory;
pub(crate) mod data_plane;
mod executor;
mod link;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Backend, Completion, Path};
use crate::aligned::AlignedBytes;
use crate::buffer::ViewMut;
use crate::call::Call;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::operation::{Operation, ReduceOp, Signature};
use crate::rank::Rank;
use crate::roster::{BackendKind, Member};
use crate::schedule::Algorithm;
use crate::schedule::build::Shape;
use crate::schedule::cost::LinkModel;
use crate::schedule::select::{Demand, select};
use crate::wire::frame::{Header, Kind, MAX_REASON};
use compiled::Compiled;
use data_plane::Connection;
use executor::{Context, History, Progress, Run, Spaces};
use link::{Link, Patience};

/// Choices and programs remembered. A model has a handful of shapes; more than this many come from a sweep over lengths.
const REMEMBERED: usize = 512;

/// From this many bytes of each rank's part on, payloads are fetched from their senders' memory where that can be done.
/// Below, the words that it takes cost more than the copy that it saves.
const BY_REFERENCE_FROM: usize = 128 << 10;

/// How a group behaves on its links.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) demand: Demand,
    pub(crate) segment: usize,
    pub(crate) spin: Duration,
}

/// One rank's end of a group.
pub(crate) struct Tcp {
    group: String,
    rank: Rank,
    name: Rank,
    links: Vec<Option<Link>>,
    settings: Settings,
    forced: Option<Path>,
    /// Every rank can read every other's memory.
    cross_memory: bool,
    model: LinkModel,
    patience: Patience,
    /// How calls go that were made before.
    choices: HashMap<(Operation, DType, usize), (Path, Algorithm)>,
    programs: HashMap<Shape, Arc<Compiled>>,
    progress: Progress,
    history: History,
    scratch: AlignedBytes,
}

impl Tcp {
    /// `members` in group order; `connections` as [`data_plane::DataPlane::connect`] gives them.
    pub(crate) fn new(
        group: &str,
        rank: Rank,
        members: &[&Member],
        connections: Vec<Option<Connection>>,
        settings: Settings,
    ) -> Self {
        let links = members
            .iter()
            .zip(connections)
            .map(|(member, connection)| connection.map(|c| Link::new((*member).clone(), c, settings.segment)))
            .collect();
        let model = link_model(members);
        let patience = Patience { spin: settings.spin, yields: model.parallel < members.len() };
        Self {
            group: group.to_owned(),
            rank,
            name: members[rank.index()].rank,
            links,
            forced: None,
            cross_memory: false,
            settings,
            model,
            patience,
            choices: HashMap::new(),
            programs: HashMap::new(),
            progress: Progress::default(),
            history: History::default(),
            scratch: AlignedBytes::default(),
        }
    }

    fn program(&mut self, shape: Shape) -> Arc<Compiled> {
        if let Some(known) = self.programs.get(&shape) {
            return Arc::clone(known);
        }
        if self.programs.len() >= REMEMBERED {
            self.programs.clear();
        }
        let compiled = Arc::new(Compiled::new(shape, self.rank.index(), self.links.len()));
        self.programs.insert(shape, Arc::clone(&compiled));
        compiled
    }

    /// Finds out whether every rank can read every other's memory, which all must know alike. All members call this,
    /// once, before anything else.
    pub(crate) fn agree_on_cross_memory(&mut self, deadline: Instant) -> Result<()> {
        let can = self.links.iter().flatten().all(|link| link.readable.is_some());
        let mut agreed = [u8::from(can)];
        let signature =
            Signature { operation: Operation::AllReduce(ReduceOp::Min), dtype: DType::U8, count: 1 };
        let output = Some(ViewMut::of(&mut agreed));
        let call = Call { signature, sequence: 0, deadline, in_place: true, input: None, output };
        // Nobody has a group yet that could tell the others.
        self.submit(call).inspect_err(|error| self.abort(error))?;
        self.cross_memory = agreed == [1];
        self.choices.clear();
        Ok(())
    }

    /// How a call goes, worked out once.
    fn path(&mut self, operation: Operation, dtype: DType, count: usize) -> (Path, Algorithm) {
        if let Some(known) = self.choices.get(&(operation, dtype, count)) {
            return *known;
        }
        if self.choices.len() >= REMEMBERED {
            self.choices.clear();
        }
        let choice = self.choose(operation, dtype, count);
        self.choices.insert((operation, dtype, count), choice);
        choice
    }

    /// How a call goes. Depends on nothing that differs between ranks.
    fn choose(&self, operation: Operation, dtype: DType, count: usize) -> (Path, Algorithm) {
        let n = self.links.len();
        let (wanted, demand) = match self.forced {
            Some(Path::CrossMemory) => (true, None),
            Some(Path::Tcp(algorithm)) => (false, Some(algorithm)),
            _ => {
                let part = if operation.is_chunked() { count } else { count / n } * dtype.size();
                let demand = self.settings.demand;
                (self.cross_memory && demand.is_none() && part >= BY_REFERENCE_FROM, demand)
            }
        };
        if let Some(algorithm) = Algorithm::by_reference(operation).filter(|_| wanted) {
            return (Path::CrossMemory, algorithm);
        }
        let algorithm = select(operation, dtype, count, n, demand, &self.model);
        (Path::Tcp(algorithm), algorithm)
    }
}

/// What the group's hosts can do, from the roster alone: every rank must come to the same figures.
fn link_model(members: &[&Member]) -> LinkModel {
    let mut hosts: HashMap<&str, (usize, usize)> = HashMap::new();
    for member in members {
        let (ranks, cpus) = hosts.entry(&member.host).or_default();
        *ranks += 1;
        *cpus = (*cpus).max(member.cpus as usize);
    }
    let parallel = hosts.values().map(|(ranks, cpus)| (*ranks).min((*cpus).max(1))).sum();
    LinkModel { latency: 12e-6, message: 5e-6, byte: 0.45e-9, parallel }
}

impl Backend for Tcp {
    fn kind(&self) -> BackendKind {
        BackendKind::Tcp
    }

    fn submit(&mut self, call: Call<'_>) -> Result<Completion> {
        let Call { signature, sequence, deadline, in_place, input, output } = call;
        let operation = signature.operation;
        let (path, algorithm) = self.path(operation, signature.dtype, signature.count);
        let by_reference = path == Path::CrossMemory;
        // A barrier is the maximum of one byte.
        let mut token = [0u8];
        let mut output = output;
        let (count, output): (_, &mut [u8]) = match (&mut output, operation) {
            (_, Operation::Barrier) => (1, &mut token),
            (Some(view), _) => (signature.count, view.host()?),
            (None, _) => (signature.count, &mut []),
        };
        let shape = Shape { operation, algorithm, count, in_place, by_reference };
        let compiled = self.program(shape);
        let scratch = self.scratch.first(compiled.scratch * signature.dtype.size());
        if !operation.is_point_to_point() {
            self.history.push(sequence, signature);
        }
        let run = Run {
            context: Context {
                group: &self.group,
                rank: self.rank,
                name: self.name,
                segment: self.settings.segment,
                patience: self.patience,
                history: &self.history,
            },
            links: &mut self.links,
            compiled: &compiled,
            by_reference,
            signature,
            sequence,
            deadline,
            spaces: Spaces { input: input.map(|v| v.host()).transpose()?, output, scratch },
            progress: &mut self.progress,
        };
        run.run()?;
        Ok(Completion { path, enqueued: false, captured: false })
    }

    fn paths(&self) -> Vec<Path> {
        let by_links = Algorithm::ALL.into_iter().map(Path::Tcp);
        by_links.chain(self.cross_memory.then_some(Path::CrossMemory)).collect()
    }

    fn force(&mut self, path: Option<Path>) -> Result<()> {
        if let Some(unknown) = path.filter(|p| !self.paths().contains(p)) {
            return Err(Error::invalid(format!("this group on the TCP backend has no path `{unknown}`")));
        }
        self.forced = path;
        self.choices.clear();
        Ok(())
    }

    fn abort(&mut self, why: &Error) {
        let (origin, reason) = match why {
            Error::PeerAborted { rank, reason } => (*rank, reason.clone()),
            other => (self.name, other.to_string()),
        };
        let mut end = reason.len().min(MAX_REASON);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let header = control(Kind::Abort, origin, end);
        for link in self.links.iter_mut().flatten() {
            if link.mid_frame {
                // The frame under way cannot be finished nor cut into: only the end of the link can say it.
                link.cut();
            } else {
                link.queue_control(&header, &reason.as_bytes()[..end]);
                // The peer may be reading this rank's memory, which its caller gets back next: it must know by now.
                if !link.flush_control() {
                    link.cut();
                }
            }
        }
    }
}

fn control(kind: Kind, rank: Rank, length: usize) -> Header {
    let signature = Signature { operation: Operation::Barrier, dtype: DType::U8, count: 0 };
    Header { kind, signature, algorithm: Algorithm::Direct, sequence: 0, length, address: 0, rank }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let goodbye = control(Kind::Goodbye, self.name, 0);
        for link in self.links.iter_mut().flatten().filter(|l| l.closed.is_none()) {
            link.queue_control(&goodbye, &[]);
            link.flush_control();
        }
    }
}
