//! A program prepared for execution: hazards derived, nodes sorted by peer.

use crate::link::mesh::{Peer, Peers};
use crate::schedule::Hosts;
use crate::schedule::build::{CollectiveSpec, build};
use crate::schedule::hazards::{Hazard, hazards};
use crate::schedule::program::{Node, Region, Source};
use crate::types::operation::Operation;

#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) spec: CollectiveSpec,
    /// Number of elements of each node.
    pub(super) lengths: Vec<usize>,
    /// Hazards of each node.
    pub(super) hazards: Vec<Vec<Hazard>>,
    /// Messages to each peer, in order.
    pub(super) sends: Peers<Vec<Send>>,
    /// Messages from each peer, in order.
    pub(super) receives: Peers<Vec<Receive>>,
    pub(super) reductions: Vec<Reduction>,
    /// Copies within this rank's memory, in order.
    pub(super) copies: Vec<Copy>,
    /// Number of elements of scratch memory.
    pub(super) scratch: usize,
    /// True if this rank yields its processor before it looks for messages, where ranks share processors: it cannot finish before
    /// all other ranks have entered the call.
    pub(super) yields_first: bool,
}

#[derive(Debug)]
pub(super) struct Send {
    pub(super) node: usize,
    pub(super) region: Region,
}

#[derive(Debug)]
pub(super) struct Receive {
    pub(super) node: usize,
    pub(super) into: Target,
}

/// The destination of a message.
#[derive(Debug)]
pub(super) enum Target {
    Region(Region),
    /// One operand of the reduction with this index.
    Reduction(usize),
}

#[derive(Debug)]
pub(super) struct Reduction {
    pub(super) node: usize,
    pub(super) into: Region,
    /// The operands, in order.
    pub(super) operands: Vec<Operand>,
    /// The peers whose messages are operands.
    pub(super) peers: Vec<Peer>,
    /// True if an average divides at this node.
    pub(super) last: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Operand {
    Peer(Peer),
    Own(Region),
}

#[derive(Debug)]
pub(super) struct Copy {
    pub(super) node: usize,
    pub(super) from: Region,
    pub(super) into: Region,
}

impl Compiled {
    pub(super) fn new(spec: CollectiveSpec, rank: usize, hosts: &Hosts) -> Self {
        let n = hosts.world_size();
        let program = build(spec, rank, hosts);
        let peer = |other| Peer::new(other, rank).expect("no schedule sends to its own rank");
        let mut compiled = Self {
            spec,
            lengths: program.nodes.iter().map(|node| node.region().len()).collect(),
            hazards: hazards(&program),
            sends: Peers::from_fn(rank, n, |_| Vec::new()),
            receives: Peers::from_fn(rank, n, |_| Vec::new()),
            reductions: Vec::new(),
            copies: Vec::new(),
            scratch: program.scratch,
            yields_first: false,
        };
        for (node, what) in program.nodes.into_iter().enumerate() {
            match what {
                Node::Send { to, region } => compiled.sends[peer(to)].push(Send { node, region }),
                Node::Receive { from, region } => {
                    compiled.receives[peer(from)].push(Receive { node, into: Target::Region(region) });
                }
                Node::Reduce { into, sources, last } => {
                    if let [Source::Own(from)] = sources[..] {
                        compiled.copies.push(Copy { node, from, into });
                        continue;
                    }
                    let operand = |source| match source {
                        Source::Peer(other) => Operand::Peer(peer(other)),
                        Source::Own(region) => Operand::Own(region),
                    };
                    let operands: Vec<Operand> = sources.into_iter().map(operand).collect();
                    let peers = operands.iter().filter_map(|operand| match operand {
                        Operand::Peer(peer) => Some(*peer),
                        Operand::Own(_) => None,
                    });
                    let reduction = Reduction { node, into, peers: peers.collect(), operands, last };
                    for &from in &reduction.peers {
                        let into = Target::Reduction(compiled.reductions.len());
                        compiled.receives[from].push(Receive { node, into });
                    }
                    compiled.reductions.push(reduction);
                }
            }
        }
        // No rank finishes a barrier or a rooted call before all ranks have entered it.
        compiled.yields_first = spec.operation == Operation::Barrier
            || spec.operation.root().is_some()
            || compiled.receives.pairs().all(|(_, messages)| !messages.is_empty());
        compiled
    }
}
