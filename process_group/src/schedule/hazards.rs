//! Dependencies between nodes: read-after-write, write-after-read and write-after-write on overlapping regions.
//!
//! Nodes stream: a node that has finished its first `k` elements allows a later node to progress up to those. This overlaps
//! reduction with transfer, and pipelines a ring, without segments in any schedule.

use super::program::{Node, Program, Region, Source};

/// A limit on one node's progress, set by another's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hazard {
    /// Index of the earlier node.
    pub on: usize,
    /// Position of the overlap, in the earlier node's progress.
    theirs: (usize, usize),
    /// Start of the overlap, in this node's progress.
    mine: usize,
}

impl Hazard {
    /// Returns how far this node may progress, in elements, when the other has finished `done`; `usize::MAX` if there is no limit
    /// any more.
    pub fn limit(&self, done: usize) -> usize {
        let (start, end) = self.theirs;
        if done >= end { usize::MAX } else { self.mine + done.saturating_sub(start) }
    }
}

struct Access {
    region: Region,
    writes: bool,
}

fn accesses(node: &Node) -> Vec<Access> {
    let read = |region| Access { region, writes: false };
    let write = |region| Access { region, writes: true };
    match node {
        Node::Send { region, .. } => vec![read(*region)],
        Node::Receive { region, .. } => vec![write(*region)],
        Node::Reduce { into, sources, .. } => {
            let mut all = vec![write(*into)];
            all.extend(sources.iter().filter_map(|s| match s {
                Source::Own(region) if region != into => Some(read(*region)),
                _ => None,
            }));
            all
        }
    }
}

/// Returns, for each node, the earlier nodes that limit it.
pub fn hazards(program: &Program) -> Vec<Vec<Hazard>> {
    let accesses: Vec<_> = program.nodes.iter().map(accesses).collect();
    let of_regions =
        |later: usize| (0..later).flat_map(|on| between(&accesses[later], &accesses[on], on)).collect();
    (0..accesses.len()).map(of_regions).collect()
}

fn between<'a>(later: &'a [Access], earlier: &'a [Access], on: usize) -> impl Iterator<Item = Hazard> + 'a {
    later.iter().flat_map(move |mine| {
        earlier.iter().filter_map(move |theirs| {
            let (a, b) = (mine.region, theirs.region);
            let (start, end) = (a.start.max(b.start), a.end.min(b.end));
            let meet = a.space == b.space && start < end && (mine.writes || theirs.writes);
            meet.then(|| Hazard { on, theirs: (start - b.start, end - b.start), mine: start - a.start })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::program::Space;
    use super::*;

    fn region(start: usize, end: usize) -> Region {
        Region { space: Space::Output, start, end }
    }

    #[test]
    fn a_send_follows_the_reduction_that_makes_its_elements() {
        let program = Program {
            nodes: vec![
                Node::Receive { from: 1, region: region(10, 20) },
                Node::Send { to: 2, region: region(5, 15) },
            ],
            ..Program::default()
        };
        let hazard = hazards(&program)[1][0];
        assert_eq!(hazard.limit(0), 5, "elements 5..10 do not depend on the receive");
        assert_eq!(hazard.limit(3), 8);
        assert_eq!(hazard.limit(5), usize::MAX);
    }

    #[test]
    fn two_sends_of_one_region_do_not_wait_for_each_other() {
        let send = |to| Node::Send { to, region: region(0, 9) };
        let program = Program { nodes: vec![send(1), send(2)], ..Program::default() };
        assert!(hazards(&program)[1].is_empty());
    }
}
