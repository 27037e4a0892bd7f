//! One suite for every backend: each operation, element type, reduction, world size and length, in place and out of place.
//!
//! Inputs are small integers chosen so that every reduction is exact in every type and order. Results are compared with
//! the one right answer, bit by bit, so all ranks have the same bits. Buffers are where the group works.

use std::ops::Range;

use half::{bf16, f16};
use ryzanstein_config::{BackendChoice, Config};
use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::schedule::Algorithm;
use ryzanstein_process_group::{Buffer, BufferMut, GroupBuffer, ProcessGroup, Rank, ReduceOp};

use crate::pattern::Pattern;
use crate::{Small, config, in_good_order, on_hosts};

/// Lengths of vectors and of chunks, on every path.
const SHORT: [usize; 4] = [0, 1, 7, 1023];
/// Of one element type on every path.
const MEDIUM: usize = (1 << 17) + 1;
/// Of everything, on the path that the backend chooses.
const LONG: usize = (1 << 20) + 3;

/// Returns element `i` of rank `rank`'s operand.
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

/// Returns element `i` of the data that rank `rank` sends.
fn letter(rank: usize, i: usize) -> u32 {
    ((rank * 31 + i * 5 + i / 120) % 120) as u32
}

/// A value to be overwritten: no result has it.
const POISON: u32 = 125;

/// One rank's calls with elements of one type.
struct Caller<'g, T> {
    group: &'g mut ProcessGroup,
    root: Rank,
    /// Elements of a vector, and of each rank's chunk in the operations that have chunks.
    count: usize,
    chunk: usize,
    /// Each rank's payload in operations that only move data.
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

    /// Checks asynchronous and coalesced calls.
    fn beside(&mut self) {
        for &op in ReduceOp::ALL {
            self.reductions_beside(op);
        }
        self.moves_beside();
    }

    /// Elements of an array with a chunk for each rank.
    fn array(&self) -> usize {
        self.group.world_size() * self.chunk
    }

    /// Puts the beginning of a pattern where the group works.
    fn put(&self, pattern: &Pattern<T>, length: usize) -> GroupBuffer<T> {
        let mut values = vec![T::small(0); length];
        pattern.fill(0, &mut values);
        self.group.upload(&values).unwrap()
    }

    /// Compares part of a buffer, or all of it, with what a pattern holds from `from` on.
    fn check(
        &mut self,
        (pattern, from): (&Pattern<T>, usize),
        got: &GroupBuffer<T>,
        part: impl Into<Option<Range<usize>>>,
        what: &str,
    ) {
        let got = self.group.download(got).unwrap();
        let part = part.into().unwrap_or(0..got.len());
        let (n, me) = (self.group.world_size(), self.group.rank());
        pattern.check(from, &got[part], format_args!("{what} of {}, rank {me} of {n}", T::DTYPE));
    }

    fn reductions(&mut self, op: ReduceOp) {
        let (n, me, root) = (self.group.world_size(), self.group.rank().index(), self.root);
        let (count, chunk, am_root) = (self.count, self.chunk, self.group.rank() == self.root);
        let mine = Pattern::<T>::new(|i| operand(op, me, i));
        let result = Pattern::<T>::new(|i| reduced(op, n, i));
        let poison = self.poison.clone();
        let at = me * chunk;

        let mut x = self.put(&mine, count);
        self.group.all_reduce(&mut x, op).unwrap();
        self.check((&result, 0), &x, None, &format!("all_reduce({op}) in place"));

        let mut x = self.put(&mine, count);
        self.group.reduce(&mut x, op, root).unwrap();
        let expected = if am_root { &result } else { &mine };
        self.check((expected, 0), &x, None, &format!("reduce({op}) in place"));

        let mut x = self.put(&mine, self.array());
        self.group.reduce_scatter(&mut x, op).unwrap();
        self.check((&result, at), &x, at..at + chunk, &format!("reduce_scatter({op}) in place"));

        let (input, inputs) = (self.put(&mine, count), self.put(&mine, self.array()));
        let mut out = self.put(&poison, count);
        self.group.all_reduce_into(&input, &mut out, op).unwrap();
        self.check((&result, 0), &out, None, &format!("all_reduce({op}) out of place"));

        let mut out = self.put(&poison, count);
        let to = am_root.then_some(&mut out as &mut dyn BufferMut);
        self.group.reduce_into(&input, to, op, root).unwrap();
        let expected = if am_root { &result } else { &poison };
        self.check((expected, 0), &out, None, &format!("reduce({op}) out of place"));

        let mut out = self.put(&poison, chunk);
        self.group.reduce_scatter_into(&inputs, &mut out, op).unwrap();
        self.check((&result, at), &out, None, &format!("reduce_scatter({op}) out of place"));
        self.check((&mine, 0), &input, None, &format!("the input of {op}"));
        self.check((&mine, 0), &inputs, None, &format!("the input of {op}"));
    }

    fn reductions_beside(&mut self, op: ReduceOp) {
        let (n, me) = (self.group.world_size(), self.group.rank().index());
        let (count, chunk, at) = (self.count, self.chunk, me * self.chunk);
        let mine = Pattern::<T>::new(|i| operand(op, me, i));
        let result = Pattern::<T>::new(|i| reduced(op, n, i));

        // Two on their way at once.
        let (x, xs) = (self.put(&mine, count), self.put(&mine, self.array()));
        let whole = self.group.all_reduce_async(x, op).unwrap();
        let chunks = self.group.reduce_scatter_async(xs, op).unwrap();
        let (x, xs) = (whole.wait().unwrap(), chunks.wait().unwrap());
        self.check((&result, 0), &x, None, &format!("all_reduce({op}) beside its caller"));
        self.check((&result, at), &xs, at..at + chunk, &format!("reduce_scatter({op}) beside its caller"));

        let (mut a, mut b, mut c) = (self.put(&mine, count), self.put(&mine, 3), self.put(&mine, chunk));
        self.group.all_reduce_coalesced(&mut [&mut a, &mut b, &mut c], op).unwrap();
        for x in [&a, &b, &c] {
            self.check((&result, 0), x, None, &format!("all_reduce({op}), coalesced"));
        }
    }

    /// Compares each rank's chunk with what that rank sent, from its element `from` on.
    fn check_chunks(&mut self, from: usize, got: &GroupBuffer<T>, what: &str) {
        let (n, me) = (self.group.world_size(), self.group.rank());
        let got = self.group.download(got).unwrap();
        for (sender, letters) in self.letters.iter().enumerate() {
            let chunk = &got[sender * self.chunk..][..self.chunk];
            letters.check(
                from,
                chunk,
                format_args!("{what} of {} from {sender}, rank {me} of {n}", T::DTYPE),
            );
        }
    }

    /// A whole array that is poisoned but for this rank's own chunk.
    fn own_chunk(&self) -> GroupBuffer<T> {
        let at = self.group.rank().index() * self.chunk;
        let mut values = vec![T::small(0); self.array()];
        self.poison.fill(0, &mut values);
        self.letters[self.group.rank().index()].fill(0, &mut values[at..at + self.chunk]);
        self.group.upload(&values).unwrap()
    }

    fn moves_in_place(&mut self) {
        let (me, root) = (self.group.rank().index(), self.root);
        let (count, chunk, am_root) = (self.count, self.chunk, self.group.rank() == self.root);
        let (own, poison) = (self.letters[me].clone(), self.poison.clone());
        let roots = self.letters[root.index()].clone();
        let (sent, at) = (if am_root { &own } else { &poison }, me * chunk);

        let mut x = self.put(sent, count);
        self.group.broadcast(&mut x, root).unwrap();
        self.check((&roots, 0), &x, None, "broadcast in place");

        let mut x = self.own_chunk();
        self.group.all_gather(&mut x).unwrap();
        self.check_chunks(0, &x, "all_gather in place");

        let mut x = self.own_chunk();
        self.group.gather(&mut x, root).unwrap();
        if am_root {
            self.check_chunks(0, &x, "gather in place");
        }

        let mut x = self.put(sent, self.array());
        self.group.scatter(&mut x, root).unwrap();
        self.check((&roots, at), &x, at..at + chunk, "scatter in place");

        let mut x = self.put(&own, self.array());
        self.group.all_to_all(&mut x).unwrap();
        self.check_chunks(at, &x, "all_to_all in place");
    }

    fn moves_out_of_place(&mut self) {
        let (me, root) = (self.group.rank().index(), self.root);
        let (count, chunk, am_root) = (self.count, self.chunk, self.group.rank() == self.root);
        let (own, poison) = (self.letters[me].clone(), self.poison.clone());
        let roots = self.letters[root.index()].clone();
        let at = me * chunk;

        let input = self.put(&own, count);
        let mut out = self.put(&poison, count);
        self.group.broadcast_into(am_root.then_some(&input as &dyn Buffer), &mut out, root).unwrap();
        self.check((&roots, 0), &out, None, "broadcast out of place");

        let (one, inputs) = (self.put(&own, chunk), self.put(&own, self.array()));
        let mut outs = self.put(&poison, self.array());
        self.group.all_gather_into(&one, &mut outs).unwrap();
        self.check_chunks(0, &outs, "all_gather out of place");

        let mut outs = self.put(&poison, self.array());
        let to = am_root.then_some(&mut outs as &mut dyn BufferMut);
        self.group.gather_into(&one, to, root).unwrap();
        if am_root {
            self.check_chunks(0, &outs, "gather out of place");
        } else {
            self.check((&poison, 0), &outs, None, "what is no output of gather");
        }

        let mut out = self.put(&poison, chunk);
        self.group.scatter_into(am_root.then_some(&inputs as &dyn Buffer), &mut out, root).unwrap();
        self.check((&roots, at), &out, None, "scatter out of place");

        let mut outs = self.put(&poison, self.array());
        self.group.all_to_all_into(&inputs, &mut outs).unwrap();
        self.check_chunks(at, &outs, "all_to_all out of place");
        for input in [&input, &one, &inputs] {
            self.check((&own, 0), input, None, "the input of what moves");
        }
    }

    /// All on their way at once, and a message from the first rank to the last.
    fn moves_beside(&mut self) {
        let (n, me, root) = (self.group.world_size(), self.group.rank().index(), self.root);
        let (count, am_root) = (self.count, self.group.rank() == self.root);
        let (own, roots) = (self.letters[me].clone(), self.letters[root.index()].clone());
        let sent = if am_root { &own } else { &self.poison };
        let (vector, chunk, array) = (self.put(sent, count), self.own_chunk(), self.put(&own, self.array()));
        let (letter, room) = (self.put(&own, count), self.put(&self.poison, count));
        let last = Rank(n as u32 - 1);

        let broadcast = self.group.broadcast_async(vector, root).unwrap();
        let gathered = self.group.all_gather_async(chunk).unwrap();
        let exchanged = self.group.all_to_all_async(array).unwrap();
        let message = match me {
            _ if n == 1 => None,
            0 => Some(self.group.send_async(letter, last).unwrap()),
            _ if me == last.index() => Some(self.group.recv_async(room, Rank(0)).unwrap()),
            _ => None,
        };
        let x = broadcast.wait().unwrap();
        self.check((&roots, 0), &x, None, "broadcast beside its caller");
        let x = gathered.wait().unwrap();
        self.check_chunks(0, &x, "all_gather beside its caller");
        let x = exchanged.wait().unwrap();
        self.check_chunks(me * self.chunk, &x, "all_to_all beside its caller");
        if let Some(message) = message {
            let x = message.wait().unwrap();
            let first = self.letters[0].clone();
            self.check((&first, 0), &x, None, "a message beside its caller");
        }
    }

    /// Every pair, both ways: between GPUs both ways at once, else everybody sends first. Long ones to the next rank only.
    fn messages(&mut self) {
        let (n, me) = (self.group.world_size(), self.group.rank().index());
        let own = self.put(&self.letters[me], self.count);
        for distance in 1..if self.count < LONG { n } else { n.min(2) } {
            let (to, from) = (Rank(((me + distance) % n) as u32), Rank(((me + n - distance) % n) as u32));
            let mut got = self.put(&self.poison, self.count);
            if self.group.device().is_some() {
                self.group.send_recv(&own, to, &mut got, from).unwrap();
            } else {
                self.group.send(&own, to).unwrap();
                self.group.recv(&mut got, from).unwrap();
            }
            let sent = self.letters[from.index()].clone();
            self.check((&sent, 0), &got, None, &format!("a message from {from} to {me}"));
        }
    }
}

/// Does something with elements of every type.
macro_rules! every_type {
    ($group:expr, $count:expr, $chunk:expr, $what:ident) => {
        every_type!($group, $count, $chunk, $what: f32 f64 f16 bf16 i8 u8 i32 u32 i64 u64)
    };
    ($group:expr, $count:expr, $chunk:expr, $what:ident: $($type:ty)*) => {
        $(Caller::<$type>::new($group, $count, $chunk).$what();)*
    };
}

/// Runs the suite on ranks that are threads; on GPUs, each has its own.
///
/// # Panics
/// When a value is wrong or a call fails.
pub fn conform(backend: BackendChoice, world_size: usize) {
    conform_with(&config(backend), world_size);
}

/// As [`conform`], with these settings.
///
/// # Panics
/// As there.
pub fn conform_with(config: &Config, world_size: usize) {
    in_good_order(config, world_size, |manager| run(manager.world()));
}

/// The suite over TCP on ranks of these hosts.
///
/// # Panics
/// As [`conform`].
pub fn conform_on(hosts: &[&'static str]) {
    on_hosts(&config(BackendChoice::Tcp), hosts, |mut manager| {
        let group = manager.world();
        assert!(group.paths().contains(&Path::Tcp(Algorithm::Hierarchical)), "{:?}", group.paths());
        run(group);
        manager.finalize().unwrap();
    });
}

/// Runs the suite on one rank of a group. Every rank calls this.
///
/// # Panics
/// When a value is wrong or a call fails.
pub fn run(group: &mut ProcessGroup) {
    for path in paths(group) {
        group.force_path(path).unwrap();
        for count in SHORT {
            every_type!(group, count, count, everything);
        }
        let sum_only = &mut Caller::<f32>::new(group, MEDIUM, MEDIUM);
        sum_only.reductions(ReduceOp::Sum);
        sum_only.moves_in_place();
        sum_only.moves_out_of_place();
    }
    // Every type, operation, reduction and place: vectors of the long length, and chunks that together have it.
    group.force_path(None).unwrap();
    let chunk = LONG.div_ceil(group.world_size());
    every_type!(group, LONG, chunk, everything);
    for count in SHORT {
        every_type!(group, count, count, beside);
    }
    Caller::<f32>::new(group, LONG, chunk).beside();
}

/// The backend's own choice, and every path it has.
fn paths(group: &ProcessGroup) -> Vec<Option<Path>> {
    std::iter::once(None).chain(group.paths().into_iter().map(Some)).collect()
}
