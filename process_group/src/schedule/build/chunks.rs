//! Operations with a chunk for each rank.

use super::Builder;
use crate::schedule::program::{Region, Source, Space};

impl Builder {
    pub(super) fn all_gather_ring(&mut self) {
        let (rank, n) = (self.rank, self.n);
        let own = self.lone_input();
        self.send(self.next(), own);
        self.copy(own, self.output(self.chunk(rank)));
        for step in 1..n {
            self.receive(self.previous(), self.output(self.chunk(rank + n - step)));
            if step < n - 1 {
                self.send(self.next(), self.output(self.chunk(rank + n - step)));
            }
        }
    }

    pub(super) fn all_gather_direct(&mut self) {
        let own = self.lone_input();
        for to in self.others() {
            self.send(to, own);
        }
        self.copy(own, self.output(self.chunk(self.rank)));
        for from in self.others() {
            self.receive(from, self.output(self.chunk(from)));
        }
    }

    pub(super) fn reduce_scatter_ring(&mut self) {
        let (rank, n) = (self.rank, self.n);
        // Partial sums travel in the array itself in place, else in scratch as long as one chunk: a partial sum is
        // sent on before the next one is folded.
        for step in 0..n - 1 {
            let sent = self.chunk(rank + 2 * n - 1 - step);
            let folded = self.chunk(rank + 2 * n - 2 - step);
            let in_place = self.shape.in_place;
            let region = match (step, in_place) {
                (0, _) => self.input(sent),
                (_, true) => self.output(sent),
                (_, false) => self.scratch(self.shape.count),
            };
            self.send(self.next(), region);
            let last = step == n - 2;
            let into = match (last, in_place) {
                (true, _) => self.lone_output(),
                (false, true) => self.output(folded.clone()),
                (false, false) => self.scratch(self.shape.count),
            };
            let sources = vec![Source::Peer(self.previous()), Source::Own(self.input(folded))];
            self.fold(into, sources, last);
        }
    }

    pub(super) fn reduce_scatter_direct(&mut self) {
        for to in self.others() {
            self.send(to, self.input(self.chunk(to)));
        }
        let sources = self.in_rank_order(self.input(self.chunk(self.rank)));
        self.fold(self.lone_output(), sources, true);
    }

    pub(super) fn gather(&mut self, root: usize) {
        let own = self.lone_input();
        if self.rank != root {
            return self.send(root, own);
        }
        self.copy(own, self.output(self.chunk(root)));
        for from in self.others() {
            self.receive(from, self.output(self.chunk(from)));
        }
    }

    pub(super) fn scatter(&mut self, root: usize) {
        if self.rank != root {
            return self.receive(root, self.lone_output());
        }
        for to in self.others() {
            self.send(to, self.input(self.chunk(to)));
        }
        self.copy(self.input(self.chunk(root)), self.lone_output());
    }

    pub(super) fn all_to_all(&mut self) {
        // In place, the message from a rank overwrites the one to it, as far as that has left already; what is only read
        // where it lies is put aside.
        let leaves_first = self.shape.in_place && self.shape.by_reference;
        for to in self.others() {
            let chunk = self.input(self.chunk(to));
            if leaves_first {
                let aside = Region { space: Space::Scratch, ..chunk };
                self.program.scratch = self.n * self.shape.count;
                self.copy(chunk, aside);
                self.send(to, aside);
            } else {
                self.send(to, chunk);
            }
        }
        self.copy(self.input(self.chunk(self.rank)), self.output(self.chunk(self.rank)));
        for from in self.others() {
            self.receive(from, self.output(self.chunk(from)));
        }
    }
}
