//! One suite for every backend: each operation, element type, reduction, world size and length, in place and out of place.
//!
//! Inputs are small integers chosen so that every reduction is exact in every type and order. Results are compared with
//! the one right answer, bit by bit, so all ranks have the same bits.

use half::{bf16, f16};
use ryzanstein_config::BackendChoice;
use ryzanstein_process_group::backend::Path;
use ryzanstein_process_group::{Buffer, BufferMut, ProcessGroup, ProcessGroupManager, Rank, ReduceOp};
use ryzanstein_tests::pattern::Pattern;
use ryzanstein_tests::{Small, config, with_ranks};

/// Lengths of vectors and of chunks, on every path.
const SHORT: [usize; 4] = [0, 1, 7, 1023];
/// Of one element type on every path.
const MEDIUM: usize = (1 << 17) + 1;
/// Of everything, on the path that the backend chooses.
const LONG: usize = (1 << 20) + 3;

/// What rank `rank` puts into element `i` of a reduction.
fn operand(op: ReduceOp, rank: usize, i: usize) -> u32 {
    let mixed = i * 5 + i / 61;
    match op {
        ReduceOp::Product => 1 + ((mixed + rank) % 2) as u32,
        // Sums of these divide by the number of ranks, and those of eight ranks fit an i8.
        _ => (mixed % 7 + 2 * rank) as u32,
    }
}

fn reduced(op: ReduceOp, n: usize, i: usize) -> u32 {
    let all = (0..n).map(|r| operand(op, r, i));
    match op {
        ReduceOp::Sum => all.sum(),
        ReduceOp::Product => all.product(),
        ReduceOp::Min => all.min().unwrap(),
        ReduceOp::Max => all.max().unwrap(),
        ReduceOp::Avg => all.sum::<u32>() / n as u32,
    }
}

/// What stands in element `i` of what rank `rank` sends.
fn letter(rank: usize, i: usize) -> u32 {
    ((rank * 31 + i * 5 + i / 120) % 120) as u32
}

/// What must not survive: no result has it.
const POISON: u32 = 125;

/// One rank's calls with elements of one type.
struct Caller<'g, T> {
    group: &'g mut ProcessGroup,
    root: Rank,
    /// Elements of a vector, and of each rank's chunk in the operations that have chunks.
    count: usize,
    chunk: usize,
    /// What each rank sends in operations that only move data.
    letters: Vec<Pattern<T>>,
    poison: Pattern<T>,
}

impl<'g, T: Small> Caller<'g, T> {
    fn new(group: &'g mut ProcessGroup, count: usize, chunk: usize) -> Self {
        let n = group.world_size();
        let letters = (0..n).map(|rank| Pattern::new(|i| letter(rank, i))).collect();
        let root = Rank((count % n) as u32);
        Self { group, root, count, chunk, letters, poison: Pattern::new(|_| POISON) }
    }

    fn everything(&mut self) {
        for &op in ReduceOp::ALL {
            self.reductions(op);
        }
        self.moves_in_place();
        self.moves_out_of_place();
        self.messages();
        self.group.barrier().unwrap();
    }

    /// Elements of an array with a chunk for each rank.
    fn array(&self) -> usize {
        self.group.world_size() * self.chunk
    }

    fn reductions(&mut self, op: ReduceOp) {
        let (n, me, root) = (self.group.world_size(), self.group.rank().index(), self.root);
        let (count, chunk, am_root) = (self.count, self.chunk, self.group.rank() == self.root);
        let mine = Pattern::<T>::new(|i| operand(op, me, i));
        let result = Pattern::<T>::new(|i| reduced(op, n, i));
        let at = me * chunk;
        let what =
            |call: &str, place: &str| format!("{call}({op}) of {} {place}, rank {me} of {n}", T::DTYPE);

        let mut x = vec![T::small(0); count.max(self.array())];
        let mut out = vec![T::small(0); count];
        assert!(chunk <= count, "one buffer is long enough for both");
        mine.fill(0, &mut x[..count]);
        self.group.all_reduce(&mut x[..count], op).unwrap();
        result.check(0, &x[..count], format_args!("{}", what("all_reduce", "in place")));

        mine.fill(0, &mut x[..count]);
        self.group.reduce(&mut x[..count], op, root).unwrap();
        let expected = if am_root { &result } else { &mine };
        expected.check(0, &x[..count], format_args!("{}", what("reduce", "in place")));

        let array = n * chunk;
        mine.fill(0, &mut x[..array]);
        self.group.reduce_scatter(&mut x[..array], op).unwrap();
        result.check(at, &x[at..at + chunk], format_args!("{}", what("reduce_scatter", "in place")));

        mine.fill(0, &mut x);
        self.poison.fill(0, &mut out);
        self.group.all_reduce_into(&x[..count], &mut out, op).unwrap();
        result.check(0, &out, format_args!("{}", what("all_reduce", "out of place")));

        self.poison.fill(0, &mut out);
        let to = am_root.then_some(&mut out as &mut dyn BufferMut);
        self.group.reduce_into(&x[..count], to, op, root).unwrap();
        let expected = if am_root { &result } else { &self.poison };
        expected.check(0, &out, format_args!("{}", what("reduce", "out of place")));

        self.poison.fill(0, &mut out[..chunk]);
        self.group.reduce_scatter_into(&x[..array], &mut out[..chunk], op).unwrap();
        result.check(at, &out[..chunk], format_args!("{}", what("reduce_scatter", "out of place")));
        mine.check(0, &x, format_args!("{}", what("the input of reductions", "out of place")));
    }

    fn moves_in_place(&mut self) {
        let (n, me, root) = (self.group.world_size(), self.group.rank().index(), self.root);
        let (count, chunk, am_root) = (self.count, self.chunk, self.group.rank() == self.root);
        let (own, at) = (&self.letters[me], me * self.chunk);
        let what = |call: &str| format!("{call} of {} in place, rank {me} of {n}", T::DTYPE);

        let mut x = vec![T::small(0); count];
        if am_root { own } else { &self.poison }.fill(0, &mut x);
        self.group.broadcast(&mut x, root).unwrap();
        self.letters[root.index()].check(0, &x, format_args!("{}", what("broadcast")));

        let mut x = vec![T::small(0); n * chunk];
        for call in ["all_gather", "gather"] {
            self.poison.fill(0, &mut x);
            own.fill(0, &mut x[at..at + chunk]);
            if call == "gather" {
                self.group.gather(&mut x, root).unwrap();
            } else {
                self.group.all_gather(&mut x).unwrap();
            }
            if call == "all_gather" || am_root {
                for (from, letters) in self.letters.iter().enumerate() {
                    letters.check(0, &x[from * chunk..][..chunk], format_args!("{}", what(call)));
                }
            }
        }

        if am_root { own } else { &self.poison }.fill(0, &mut x);
        self.group.scatter(&mut x, root).unwrap();
        self.letters[root.index()].check(at, &x[at..at + chunk], format_args!("{}", what("scatter")));

        own.fill(0, &mut x);
        self.group.all_to_all(&mut x).unwrap();
        for (from, letters) in self.letters.iter().enumerate() {
            letters.check(at, &x[from * chunk..][..chunk], format_args!("{}", what("all_to_all")));
        }
    }

    fn moves_out_of_place(&mut self) {
        let (n, me, root) = (self.group.world_size(), self.group.rank().index(), self.root);
        let (count, chunk, am_root) = (self.count, self.chunk, self.group.rank() == self.root);
        let (own, at) = (&self.letters[me], me * self.chunk);
        let what = |call: &str| format!("{call} of {} out of place, rank {me} of {n}", T::DTYPE);

        let mut input = vec![T::small(0); count];
        let mut out = input.clone();
        own.fill(0, &mut input);
        self.poison.fill(0, &mut out);
        self.group.broadcast_into(am_root.then_some(&input as &dyn Buffer), &mut out, root).unwrap();
        self.letters[root.index()].check(0, &out, format_args!("{}", what("broadcast")));

        let mut inputs = vec![T::small(0); n * chunk];
        let mut outs = inputs.clone();
        own.fill(0, &mut inputs);
        for call in ["all_gather", "gather"] {
            self.poison.fill(0, &mut outs);
            if call == "gather" {
                let to = am_root.then_some(&mut outs as &mut dyn BufferMut);
                self.group.gather_into(&inputs[..chunk], to, root).unwrap();
            } else {
                self.group.all_gather_into(&inputs[..chunk], &mut outs).unwrap();
            }
            if call == "all_gather" || am_root {
                for (from, letters) in self.letters.iter().enumerate() {
                    letters.check(0, &outs[from * chunk..][..chunk], format_args!("{}", what(call)));
                }
            } else {
                self.poison.check(0, &outs, format_args!("{}", what("what is no output of gather")));
            }
        }

        self.poison.fill(0, &mut outs);
        let from = am_root.then_some(&inputs as &dyn Buffer);
        self.group.scatter_into(from, &mut outs[..chunk], root).unwrap();
        self.letters[root.index()].check(at, &outs[..chunk], format_args!("{}", what("scatter")));

        self.poison.fill(0, &mut outs);
        self.group.all_to_all_into(&inputs, &mut outs).unwrap();
        for (from, letters) in self.letters.iter().enumerate() {
            letters.check(at, &outs[from * chunk..][..chunk], format_args!("{}", what("all_to_all")));
        }
        own.check(0, &input, format_args!("{}", what("the input")));
        own.check(0, &inputs, format_args!("{}", what("the input")));
    }

    /// Every pair, both ways, everybody sending first. Long ones to the next rank only.
    fn messages(&mut self) {
        let (n, me) = (self.group.world_size(), self.group.rank().index());
        let mut own = vec![T::small(0); self.count];
        let mut got = own.clone();
        self.letters[me].fill(0, &mut own);
        for distance in 1..if self.count < LONG { n } else { n.min(2) } {
            let (to, from) = ((me + distance) % n, (me + n - distance) % n);
            self.group.send(&own, Rank(to as u32)).unwrap();
            self.poison.fill(0, &mut got);
            self.group.recv(&mut got, Rank(from as u32)).unwrap();
            let what = format_args!("message of {} {} from {from} to {me}", self.count, T::DTYPE);
            self.letters[from].check(0, &got, what);
        }
    }
}

fn every_type(group: &mut ProcessGroup, count: usize, chunk: usize) {
    Caller::<f32>::new(group, count, chunk).everything();
    Caller::<f64>::new(group, count, chunk).everything();
    Caller::<f16>::new(group, count, chunk).everything();
    Caller::<bf16>::new(group, count, chunk).everything();
    Caller::<i8>::new(group, count, chunk).everything();
    Caller::<u8>::new(group, count, chunk).everything();
    Caller::<i32>::new(group, count, chunk).everything();
    Caller::<u32>::new(group, count, chunk).everything();
    Caller::<i64>::new(group, count, chunk).everything();
    Caller::<u64>::new(group, count, chunk).everything();
}

fn conform(backend: BackendChoice, world_size: usize) {
    with_ranks(&config(backend), world_size, |mut manager: ProcessGroupManager| {
        let group = manager.world();
        for path in paths(group) {
            group.force_path(path).unwrap();
            for count in SHORT {
                every_type(group, count, count);
            }
            let sum_only = &mut Caller::<f32>::new(group, MEDIUM, MEDIUM);
            sum_only.reductions(ReduceOp::Sum);
            sum_only.moves_in_place();
            sum_only.moves_out_of_place();
        }
        // Every type, operation, reduction and place: vectors of the long length, and chunks that together have it.
        group.force_path(None).unwrap();
        every_type(group, LONG, LONG.div_ceil(world_size));
        manager.finalize().unwrap();
    });
}

/// The backend's own choice, and every path it has.
fn paths(group: &ProcessGroup) -> Vec<Option<Path>> {
    std::iter::once(None).chain(group.paths().into_iter().map(Some)).collect()
}

macro_rules! suite {
    ($backend:ident, $choice:expr) => {
        mod $backend {
            use super::*;

            #[test]
            fn one_rank_does_everything_alone() {
                conform($choice, 1);
            }

            #[test]
            fn two_ranks() {
                conform($choice, 2);
            }

            #[test]
            fn three_ranks() {
                conform($choice, 3);
            }

            #[test]
            fn four_ranks() {
                conform($choice, 4);
            }

            #[test]
            fn five_ranks() {
                conform($choice, 5);
            }

            #[test]
            fn eight_ranks() {
                conform($choice, 8);
            }
        }
    };
}
suite!(loopback, BackendChoice::Loopback);
suite!(tcp, BackendChoice::Tcp);
