//! Our own collectives over TCP.
//!
//! A group is a full mesh of links. A call picks an algorithm, makes (or remembers) its program and runs it on the
//! caller's thread; nothing else touches the links.

mod compiled;
pub(crate) mod data_plane;
mod executor;
mod link;

use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use super::{Backend, Completion, Path};
use crate::aligned::AlignedBytes;
use crate::call::{Call, Operation};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::roster::{BackendKind, Member};
use crate::schedule::Algorithm;
use crate::schedule::build::Shape;
use crate::schedule::cost::LinkModel;
use crate::schedule::select::{Demand, select};
use crate::wire::frame::{Header, Kind, MAX_REASON};
use compiled::Compiled;
use executor::{Context, Progress, Run, Spaces};
use link::{Link, Patience};

/// Programs remembered. A model has a handful of shapes; more than this many come from a sweep over lengths.
const REMEMBERED: usize = 512;

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
    forced: Demand,
    model: LinkModel,
    patience: Patience,
    programs: HashMap<Shape, Arc<Compiled>>,
    progress: Progress,
    scratch: AlignedBytes,
}

impl Tcp {
    /// `members` in group order; `streams` as [`data_plane::DataPlane::connect`] gives them.
    pub(crate) fn new(
        group: &str,
        rank: Rank,
        members: &[&Member],
        streams: Vec<Option<TcpStream>>,
        settings: Settings,
    ) -> Self {
        let links = members
            .iter()
            .zip(streams)
            .map(|(member, stream)| stream.map(|s| Link::new((*member).clone(), s, settings.segment)))
            .collect();
        let model = link_model(members);
        let patience = Patience { spin: settings.spin, yields: model.parallel < members.len() };
        Self {
            group: group.to_owned(),
            rank,
            name: members[rank.index()].rank,
            links,
            forced: settings.demand,
            settings,
            model,
            patience,
            programs: HashMap::new(),
            progress: Progress::default(),
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

    fn algorithm(&self, operation: Operation, dtype: DType, count: usize) -> Algorithm {
        select(operation, dtype, count, self.links.len(), self.forced, &self.model)
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
        let algorithm = self.algorithm(operation, signature.dtype, signature.count);
        // A barrier is the maximum of one byte.
        let mut token = [0u8];
        let mut output = output;
        let (count, output): (_, &mut [u8]) = match (&mut output, operation) {
            (_, Operation::Barrier) => (1, &mut token),
            (Some(view), _) => (signature.count, view.host()?),
            (None, _) => (signature.count, &mut []),
        };
        let shape = Shape { operation, algorithm, count, in_place };
        let compiled = self.program(shape);
        let scratch = self.scratch.first(compiled.scratch * signature.dtype.size());
        let run = Run {
            context: Context {
                group: &self.group,
                rank: self.rank,
                name: self.name,
                segment: self.settings.segment,
                patience: self.patience,
            },
            links: &mut self.links,
            compiled: &compiled,
            signature,
            sequence,
            deadline,
            spaces: Spaces { input: input.map(|v| v.host()).transpose()?, output, scratch },
            progress: &mut self.progress,
        };
        run.run()?;
        Ok(Completion { path: Path::Tcp(algorithm), enqueued: false })
    }

    fn paths(&self) -> Vec<Path> {
        Algorithm::ALL.into_iter().map(Path::Tcp).collect()
    }

    fn force(&mut self, path: Option<Path>) -> Result<()> {
        self.forced = match path {
            None => self.settings.demand,
            Some(Path::Tcp(algorithm)) => Some(algorithm),
            Some(other) => return Err(Error::invalid(format!("the TCP backend has no path `{other}`"))),
        };
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
                link.flush_control();
            }
        }
    }
}

fn control(kind: Kind, rank: Rank, length: usize) -> Header {
    let signature = crate::Signature { operation: Operation::Barrier, dtype: DType::U8, count: 0 };
    Header { kind, signature, algorithm: Algorithm::Direct, sequence: 0, length, rank }
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
