//! A program made ready to run: hazards derived, nodes sorted by link.

use crate::schedule::build::{Shape, build};
use crate::schedule::hazards::{Hazard, hazards};
use crate::schedule::program::{Node, Source};

#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) shape: Shape,
    pub(super) nodes: Vec<Node>,
    pub(super) hazards: Vec<Vec<Hazard>>,
    /// By peer: its sends, in order.
    pub(super) sends: Vec<Vec<usize>>,
    /// By peer: the receives and folds that its messages go to, in order.
    pub(super) receives: Vec<Vec<usize>>,
    /// Copies, which wait for no message.
    pub(super) copies: Vec<usize>,
    /// Elements of scratch.
    pub(super) scratch: usize,
}

impl Compiled {
    pub(super) fn new(shape: Shape, rank: usize, n: usize) -> Self {
        let program = build(shape, rank, n);
        let mut compiled = Self {
            shape,
            hazards: hazards(&program),
            sends: vec![Vec::new(); n],
            receives: vec![Vec::new(); n],
            copies: Vec::new(),
            scratch: program.scratch,
            nodes: program.nodes,
        };
        for (index, node) in compiled.nodes.iter().enumerate() {
            match node {
                Node::Send { to, .. } => compiled.sends[*to].push(index),
                Node::Receive { from, .. } => compiled.receives[*from].push(index),
                Node::Fold { sources, .. } => {
                    let peers: Vec<usize> = sources.iter().filter_map(peer).collect();
                    for &from in &peers {
                        compiled.receives[from].push(index);
                    }
                    if peers.is_empty() {
                        compiled.copies.push(index);
                    }
                }
            }
        }
        compiled
    }
}

pub(super) fn peer(source: &Source) -> Option<usize> {
    match source {
        Source::Peer(rank) => Some(*rank),
        Source::Own(_) => None,
    }
}
