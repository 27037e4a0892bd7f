//! Operations with a chunk for each rank.

use super::Builder;
use crate::schedule::program::Source;

impl Builder {
    pub(super) fn all_gather_ring(&mut self) {
        let (rank, n) = (self.rank, self.n);
        let own = self.lone_input();
        self.send(self.next(), own);
        self.copy(own, self.output(self.rank_chunk(rank)));
        for step in 1..n {
            self.receive(self.previous(), self.output(self.rank_chunk(rank + n - step)));
            if step < n - 1 {
                self.send(self.next(), self.output(self.rank_chunk(rank + n - step)));
            }
        }
    }

    pub(super) fn all_gather_direct(&mut self) {
        let own = self.lone_input();
        for to in self.others() {
            self.send(to, own);
        }
        self.copy(own, self.output(self.rank_chunk(self.rank)));
        for from in self.others() {
            self.receive(from, self.output(self.rank_chunk(from)));
        }
    }

    pub(super) fn reduce_scatter_ring(&mut self) {
        let (rank, n) = (self.rank, self.n);
        // In place, partial sums travel in the array itself; otherwise in scratch of the length of one chunk: a partial sum is sent
        // before the next one is computed.
        for step in 0..n - 1 {
            let sent = self.rank_chunk(rank + 2 * n - 1 - step);
            let reduced = self.rank_chunk(rank + 2 * n - 2 - step);
            let in_place = self.spec.in_place;
            let region = match (step, in_place) {
                (0, _) => self.input(sent),
                (_, true) => self.output(sent),
                (_, false) => self.scratch(self.spec.count),
            };
            self.send(self.next(), region);
            let last = step == n - 2;
            let into = match (last, in_place) {
                (true, _) => self.lone_output(),
                (false, true) => self.output(reduced.clone()),
                (false, false) => self.scratch(self.spec.count),
            };
            let sources = vec![Source::Peer(self.previous()), Source::Own(self.input(reduced))];
            self.reduce_into(into, sources, last);
        }
    }

    pub(super) fn reduce_scatter_direct(&mut self) {
        for to in self.others() {
            self.send(to, self.input(self.rank_chunk(to)));
        }
        let sources = self.in_rank_order(self.input(self.rank_chunk(self.rank)));
        self.reduce_into(self.lone_output(), sources, true);
    }

    pub(super) fn gather(&mut self, root: usize) {
        let own = self.lone_input();
        if self.rank != root {
            return self.send(root, own);
        }
        self.copy(own, self.output(self.rank_chunk(root)));
        for from in self.others() {
            self.receive(from, self.output(self.rank_chunk(from)));
        }
    }

    pub(super) fn scatter(&mut self, root: usize) {
        if self.rank != root {
            return self.receive(root, self.lone_output());
        }
        for to in self.others() {
            self.send(to, self.input(self.rank_chunk(to)));
        }
        self.copy(self.input(self.rank_chunk(root)), self.lone_output());
    }

    pub(super) fn all_to_all(&mut self) {
        // In place, the message from a rank overwrites the message to it, as far as that has been sent already.
        for to in self.others() {
            self.send(to, self.input(self.rank_chunk(to)));
        }
        self.copy(self.input(self.rank_chunk(self.rank)), self.output(self.rank_chunk(self.rank)));
        for from in self.others() {
            self.receive(from, self.output(self.rank_chunk(from)));
        }
    }
}
