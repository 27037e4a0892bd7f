//! Broadcast and reduce along a tree of ranks, of which each algorithm has its own.

use super::build::{Builder, CollectiveSpec};
use super::cost::Traffic;
use super::program::Source;
use crate::types::operation::Operation;
use crate::types::rank::Rank;

/// Returns the parent and the children of a place in a tree of `n` places with 0 at the top. Children nearest to the leaves come
/// first.
type Tree = fn(place: usize, n: usize) -> (Option<usize>, Vec<usize>);

/// Returns the parent and the children of a rank, if `root` is at the top.
fn relatives(rank: usize, n: usize, root: Rank, tree: Tree) -> (Option<usize>, Vec<usize>) {
    let rank_at = |place: usize| (place + root.index()) % n;
    let (parent, children) = tree((rank + n - root.index()) % n, n);
    (parent.map(rank_at), children.into_iter().map(rank_at).collect())
}

pub(super) fn broadcast(b: &mut Builder<'_>, root: Rank, tree: Tree) {
    let (parent, children) = relatives(b.rank, b.n, root, tree);
    let output = b.output(b.all());
    let from = if parent.is_none() { b.input(b.all()) } else { output };
    if let Some(parent) = parent {
        b.receive(parent, output);
    }
    // The farthest child has the largest subtree.
    for child in children.into_iter().rev() {
        b.send(child, from);
    }
    b.copy(from, output);
}

pub(super) fn reduce(b: &mut Builder<'_>, root: Rank, tree: Tree) {
    let (parent, children) = relatives(b.rank, b.n, root, tree);
    let mut result = b.input(b.all());
    if !children.is_empty() {
        let peers = children.into_iter().map(Source::Peer);
        let sources = std::iter::once(Source::Own(result)).chain(peers).collect();
        result = if parent.is_none() { b.output(b.all()) } else { b.scratch(b.spec.count) };
        b.reduce_into(result, sources, parent.is_none());
    }
    if let Some(parent) = parent {
        b.send(parent, result);
    }
}

/// Returns the payload of a rank in [`broadcast`] or [`reduce`].
pub(super) fn traffic(spec: &CollectiveSpec, rank: usize, n: usize, tree: Tree) -> Traffic {
    let root = spec.operation.root().expect("a tree has a root");
    let (parent, children) = tree((rank + n - root.index()) % n, n);
    let (up, down) = (usize::from(parent.is_some()), children.len());
    match spec.operation {
        Operation::Broadcast { .. } => Traffic::of(down, down * spec.count).receiving(up * spec.count),
        _ => Traffic::of(up, up * spec.count).receiving(down * spec.count),
    }
}
