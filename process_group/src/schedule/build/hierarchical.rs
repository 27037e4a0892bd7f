//! All-reduce on two levels: links within a host are fast, and the hosts share slow ones.

use std::ops::Range;

use super::{Builder, chunk_range};
use crate::schedule::Hosts;
use crate::schedule::program::{Region, Source};

/// Maximum number of elements for which hosts exchange whole chunks instead of pieces.
const WHOLE_ELEMENTS: usize = 1024;

/// Returns true if hosts exchange whole chunks of this length. Two hosts do not send more in this way, and save a round.
pub(in crate::schedule) fn exchanges_whole(hosts: usize, length: usize) -> bool {
    hosts == 2 || length <= WHOLE_ELEMENTS
}

impl Builder {
    /// The vector is divided into as many chunks as every host has ranks. The rank at place `c` of each host reduces chunk `c` over
    /// its host, then with its counterparts, and sends it to the ranks of its host. Between two hosts each byte travels once in
    /// each direction.
    ///
    /// After Thakur, Rabenseifner and Gropp for clusters of multi-core nodes; NCCL's older trees and Horovod do the same.
    pub(super) fn all_reduce_hierarchical(&mut self, hosts: &Hosts) {
        let chunks = hosts.counterparts();
        let (host, place) = hosts.place(self.rank);
        let siblings = &hosts.ranks()[host];
        let count = self.spec.count;
        // The next place comes first: at any time all ranks of a host send to different ones.
        let others: Vec<usize> = (1..siblings.len()).map(|d| (place + d) % siblings.len()).collect();
        let with_chunk = || others.iter().copied().filter(|c| *c < chunks);
        for chunk in with_chunk() {
            self.send(siblings[chunk], self.input(chunk_range(count, chunks, chunk)));
        }
        if place < chunks {
            let mine = chunk_range(count, chunks, place);
            let (input, output) = (self.input(mine.clone()), self.output(mine.clone()));
            if others.is_empty() {
                self.copy(input, output);
            } else {
                self.reduce_into(output, self.sources(siblings, input), hosts.count() == 1);
            }
            let counterparts: Vec<usize> = hosts.ranks().iter().map(|ranks| ranks[place]).collect();
            self.all_reduce_between(&counterparts, host, mine);
            for other in &others {
                self.send(siblings[*other], output);
            }
        }
        for chunk in with_chunk() {
            self.receive(siblings[chunk], self.output(chunk_range(count, chunks, chunk)));
        }
    }

    /// All-reduces a part of the output among these ranks. This rank is at `index`.
    fn all_reduce_between(&mut self, ranks: &[usize], index: usize, part: Range<usize>) {
        let n = ranks.len();
        if n == 1 {
            return;
        }
        let others: Vec<usize> = (1..n).map(|d| (index + d) % n).collect();
        let whole = self.output(part.clone());
        if exchanges_whole(n, part.len()) {
            for other in others {
                self.send(ranks[other], whole);
            }
            return self.reduce_into(whole, self.sources(ranks, whole), true);
        }
        let piece = |b: &Self, index: usize| {
            let range = chunk_range(part.len(), n, index);
            b.output(part.start + range.start..part.start + range.end)
        };
        for other in &others {
            self.send(ranks[*other], piece(self, *other));
        }
        let mine = piece(self, index);
        self.reduce_into(mine, self.sources(ranks, mine), true);
        for other in &others {
            self.send(ranks[*other], mine);
        }
        for other in &others {
            self.receive(ranks[*other], piece(self, *other));
        }
    }

    /// Returns one operand from each of these ranks, in their order.
    fn sources(&self, ranks: &[usize], own: Region) -> Vec<Source> {
        ranks.iter().map(|r| if *r == self.rank { Source::Own(own) } else { Source::Peer(*r) }).collect()
    }
}
