//! All-reduce: every rank gets the reduction of all.

use std::ops::Range;

use super::{Builder, chunk_range, largest_power_of_two};
use crate::schedule::program::{Region, Source, Space};

impl Builder {
    pub(super) fn all_reduce_ring(&mut self) {
        let (rank, n) = (self.rank, self.n);
        for step in 0..n - 1 {
            let sent = self.vector_chunk(rank + n - step);
            let region = if step == 0 { self.input(sent) } else { self.output(sent) };
            self.send(self.next(), region);
            let reduced = self.vector_chunk(rank + 2 * n - step - 1);
            let sources = vec![Source::Peer(self.previous()), Source::Own(self.input(reduced.clone()))];
            self.reduce_into(self.output(reduced), sources, step == n - 2);
        }
        for step in 0..n - 1 {
            self.send(self.next(), self.output(self.vector_chunk(rank + 1 + n - step)));
            self.receive(self.previous(), self.output(self.vector_chunk(rank + n - step)));
        }
    }

    /// Reduces surplus ranks into partners. Returns the rank's place among the largest power of two of ranks, and the region of its
    /// values after this, or `None` for a surplus rank, which then only waits for the result.
    pub(super) fn reduce_surplus(&mut self, power: usize) -> Option<Region> {
        let (input, output) = (self.input(self.all()), self.output(self.all()));
        if self.rank >= power {
            self.send(self.rank - power, input);
            self.receive(self.rank - power, output);
            return None;
        }
        if self.rank + power < self.n {
            let sources = self.pair(input, self.rank + power);
            self.reduce_into(output, sources, false);
            return Some(output);
        }
        Some(input)
    }

    pub(super) fn return_to_surplus(&mut self, power: usize) {
        if self.rank + power < self.n {
            self.send(self.rank + power, self.output(self.all()));
        }
    }

    pub(super) fn all_reduce_doubling(&mut self) {
        let power = largest_power_of_two(self.n);
        let Some(mut own) = self.reduce_surplus(power) else { return };
        let mut distance = 1;
        while distance < power {
            let partner = self.rank ^ distance;
            self.send(partner, own);
            let sources = self.pair(own, partner);
            own = self.output(self.all());
            distance *= 2;
            self.reduce_into(own, sources, distance == power);
        }
        self.return_to_surplus(power);
    }

    pub(super) fn all_reduce_halving(&mut self) {
        let power = largest_power_of_two(self.n);
        let Some(own) = self.reduce_surplus(power) else { return };
        let mut space = own.space;
        let elements = |chunks: &Range<usize>, count: usize| {
            chunk_range(count, power, chunks.start).start..chunk_range(count, power, chunks.end - 1).end
        };
        let count = self.spec.count;
        let mut chunks = 0..power;
        let mut distance = power / 2;
        while distance > 0 {
            let partner = self.rank ^ distance;
            let middle = chunks.start + distance;
            let (keep, give) = if self.rank & distance == 0 {
                (chunks.start..middle, middle..chunks.end)
            } else {
                (middle..chunks.end, chunks.start..middle)
            };
            self.send(partner, self.region(space, elements(&give, count)));
            let sources = self.pair(self.region(space, elements(&keep, count)), partner);
            self.reduce_into(self.output(elements(&keep, count)), sources, distance == 1);
            space = Space::Output;
            chunks = keep;
            distance /= 2;
        }
        distance = 1;
        while distance < power {
            let partner = self.rank ^ distance;
            let theirs = if self.rank & distance == 0 {
                chunks.end..chunks.end + distance
            } else {
                chunks.start - distance..chunks.start
            };
            self.send(partner, self.output(elements(&chunks, count)));
            self.receive(partner, self.output(elements(&theirs, count)));
            chunks = chunks.start.min(theirs.start)..chunks.end.max(theirs.end);
            distance *= 2;
        }
        self.return_to_surplus(power);
    }

    pub(super) fn all_reduce_one_shot(&mut self) {
        let input = self.input(self.all());
        for to in self.others() {
            self.send(to, input);
        }
        self.reduce_into(self.output(self.all()), self.in_rank_order(input), true);
    }

    pub(super) fn all_reduce_two_shot(&mut self) {
        for to in self.others() {
            self.send(to, self.input(self.vector_chunk(to)));
        }
        let mine = self.vector_chunk(self.rank);
        let reduced = self.output(mine.clone());
        self.reduce_into(reduced, self.in_rank_order(self.input(mine)), true);
        for to in self.others() {
            self.send(to, reduced);
        }
        for from in self.others() {
            self.receive(from, self.output(self.vector_chunk(from)));
        }
    }
}
