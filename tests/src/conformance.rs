//! One suite for every backend: each operation, element type, world size and length, in place and out of place.
//!
//! Inputs are small integers chosen so that every reduction is exact in every type and order; results are compared
//! exactly, so all ranks have the same bits.

use std::ops::Range;

use half::{bf16, f16};
use ryzanstein_config::BackendChoice;
use ryzanstein_process_group::backend::Path;
use ryzanstein_process_group::{
    Buffer, BufferMut, GroupBuffer, ProcessGroup, ProcessGroupManager, Rank, ReduceOp,
};

use crate::{Small, config, with_ranks};

const LENGTHS: [usize; 4] = [0, 1, 7, 1023];
const LONG: usize = (1 << 20) + 3;

/// What rank `rank` puts into element `i` of a reduction.
fn operand(op: ReduceOp, rank: usize, i: usize) -> u32 {
    let mixed = i * 7 + i / 61;
    match op {
        ReduceOp::Product => 1 + ((mixed + rank) % 2) as u32,
        // Sums of these divide by the number of ranks, and those of eight ranks fit an i8.
        _ => (mixed % 7 + 2 * rank) as u32,
    }
}

fn reduced<T: Small>(op: ReduceOp, n: usize, i: usize) -> T {
    let all = (0..n).map(|r| operand(op, r, i));
    match op {
        ReduceOp::Sum => T::small(all.sum()),
        ReduceOp::Product => T::small(all.product()),
        ReduceOp::Min => T::small(all.min().unwrap()),
        ReduceOp::Max => T::small(all.max().unwrap()),
        ReduceOp::Avg => T::small(all.sum::<u32>() / n as u32),
    }
}

/// What stands in element `i` of what rank `rank` sends.
fn letter<T: Small>(rank: usize, i: usize) -> T {
    T::small(((rank * 31 + i * 5 + i / 120) % 120) as u32)
}

/// What must not survive: no result has it.
fn poison<T: Small>() -> T {
    T::small(125)
}

fn make<T>(length: usize, f: impl Fn(usize) -> T) -> Vec<T> {
    (0..length).map(f).collect()
}

#[track_caller]
fn expect<T: Small>(what: &str, got: &[T], want: impl Fn(usize) -> T) {
    for (i, value) in got.iter().enumerate() {
        assert!(*value == want(i), "{what}: element {i} of {} is {value:?}, not {:?}", got.len(), want(i));
    }
}

/// Values where the group works.
fn put<T: Small>(group: &ProcessGroup, values: &[T]) -> GroupBuffer<T> {
    group.place(values).unwrap()
}

#[track_caller]
fn check<T: Small>(group: &mut ProcessGroup, what: &str, got: &GroupBuffer<T>, want: impl Fn(usize) -> T) {
    expect(what, &group.fetch(got).unwrap(), want);
}

#[track_caller]
fn check_part<T: Small>(
    group: &mut ProcessGroup,
    what: &str,
    got: &GroupBuffer<T>,
    part: Range<usize>,
    want: impl Fn(usize) -> T,
) {
    expect(what, &group.fetch(got).unwrap()[part], want);
}

/// All operations on vectors or chunks of `count` elements.
fn every_operation<T: Small>(group: &mut ProcessGroup, count: usize, ops: &[ReduceOp], in_place: &[bool]) {
    let (n, me) = (group.world_size(), group.rank().index());
    let root = Rank((count % n) as u32);
    let am_root = group.rank() == root;
    for &op in ops {
        let mine = |i: usize| T::small(operand(op, me, i));
        for &in_place in in_place {
            let what = format!("{} {op} of {count} on rank {me} of {n}, in place: {in_place}", T::DTYPE);
            let (input, array) = (make(count, mine), make(n * count, mine));
            if in_place {
                let mut x = put(group, &input);
                group.all_reduce(&mut x, op).unwrap();
                check(group, &format!("all_reduce {what}"), &x, |i| reduced(op, n, i));

                let mut x = put(group, &input);
                group.reduce(&mut x, op, root).unwrap();
                check(group, &format!("reduce {what}"), &x, |i| {
                    if am_root { reduced(op, n, i) } else { mine(i) }
                });

                let mut x = put(group, &array);
                group.reduce_scatter(&mut x, op).unwrap();
                let at = me * count;
                check_part(group, &format!("reduce_scatter {what}"), &x, at..at + count, |i| {
                    reduced(op, n, at + i)
                });
            } else {
                let blank = vec![poison::<T>(); count];
                let (input, array) = (put(group, &input), put(group, &array));
                let mut out = put(group, &blank);
                group.all_reduce_into(&input, &mut out, op).unwrap();
                check(group, &format!("all_reduce {what}"), &out, |i| reduced(op, n, i));

                let mut out = put(group, &blank);
                group
                    .reduce_into(&input, am_root.then_some(&mut out as &mut dyn BufferMut), op, root)
                    .unwrap();
                let want = |i| if am_root { reduced(op, n, i) } else { poison() };
                check(group, &format!("reduce {what}"), &out, want);

                let mut out = put(group, &blank);
                group.reduce_scatter_into(&array, &mut out, op).unwrap();
                check(group, &format!("reduce_scatter {what}"), &out, |i| reduced(op, n, me * count + i));
                check(group, &format!("input of {what}"), &input, mine);
                check(group, &format!("array of {what}"), &array, mine);
            }
        }
    }
    for &in_place in in_place {
        moves::<T>(group, count, root, in_place);
    }
    messages::<T>(group, count);
    group.barrier().unwrap();
}

/// The operations that only move data.
fn moves<T: Small>(group: &mut ProcessGroup, count: usize, root: Rank, in_place: bool) {
    let (n, me) = (group.world_size(), group.rank().index());
    let am_root = group.rank() == root;
    let what = format!("{} of {count} on rank {me} of {n}, in place: {in_place}", T::DTYPE);
    let own = make(count, |i| letter::<T>(me, i));
    let array = make(n * count, |i| letter::<T>(me, i));
    let blank = vec![poison::<T>(); count];
    let blanks = vec![poison::<T>(); n * count];
    let at = me * count;
    let gathered = |i: usize| letter::<T>(i / count, i % count);
    let scattered = |i: usize| letter::<T>(root.index(), at + i);
    let exchanged = |i: usize| letter::<T>(i / count, at + i % count);
    if in_place {
        let mut x = put(group, &if am_root { own.clone() } else { blank.clone() });
        group.broadcast(&mut x, root).unwrap();
        check(group, &format!("broadcast {what}"), &x, |i| letter(root.index(), i));

        let mut x = blanks.clone();
        x[at..at + count].copy_from_slice(&own);
        let mut x = put(group, &x);
        group.all_gather(&mut x).unwrap();
        check(group, &format!("all_gather {what}"), &x, gathered);

        let mut x = blanks.clone();
        x[at..at + count].copy_from_slice(&own);
        let mut x = put(group, &x);
        group.gather(&mut x, root).unwrap();
        if am_root {
            check(group, &format!("gather {what}"), &x, gathered);
        }

        let mut x = put(group, &if am_root { array.clone() } else { blanks.clone() });
        group.scatter(&mut x, root).unwrap();
        check_part(group, &format!("scatter {what}"), &x, at..at + count, scattered);

        let mut x = put(group, &array);
        group.all_to_all(&mut x).unwrap();
        check(group, &format!("all_to_all {what}"), &x, exchanged);
    } else {
        let (own, array) = (put(group, &own), put(group, &array));
        let mut out = put(group, &blank);
        group.broadcast_into(am_root.then_some(&own as &dyn Buffer), &mut out, root).unwrap();
        check(group, &format!("broadcast {what}"), &out, |i| letter(root.index(), i));

        let mut out = put(group, &blanks);
        group.all_gather_into(&own, &mut out).unwrap();
        check(group, &format!("all_gather {what}"), &out, gathered);

        let mut out = put(group, &blanks);
        group.gather_into(&own, am_root.then_some(&mut out as &mut dyn BufferMut), root).unwrap();
        if am_root {
            check(group, &format!("gather {what}"), &out, gathered);
        }

        let mut out = put(group, &blank);
        group.scatter_into(am_root.then_some(&array as &dyn Buffer), &mut out, root).unwrap();
        check(group, &format!("scatter {what}"), &out, scattered);

        let mut out = put(group, &blanks);
        group.all_to_all_into(&array, &mut out).unwrap();
        check(group, &format!("all_to_all {what}"), &out, exchanged);
    }
}

/// Every pair, both ways. Between GPUs both ways at once; else everybody sends first.
fn messages<T: Small>(group: &mut ProcessGroup, count: usize) {
    let (n, me) = (group.world_size(), group.rank().index());
    let own = put(group, &make(count, |i| letter::<T>(me, i)));
    for distance in 1..n {
        let (to, from) = (Rank(((me + distance) % n) as u32), Rank(((me + n - distance) % n) as u32));
        let mut got = put(group, &vec![poison::<T>(); count]);
        if group.device().is_some() {
            group.send_recv(&own, to, &mut got, from).unwrap();
        } else {
            group.send(&own, to).unwrap();
            group.recv(&mut got, from).unwrap();
        }
        let what = format!("message of {count} {} from {from} to {me}", T::DTYPE);
        check(group, &what, &got, |i| letter(from.index(), i));
    }
}

fn all_types(group: &mut ProcessGroup, count: usize, ops: &[ReduceOp], in_place: &[bool]) {
    every_operation::<f32>(group, count, ops, in_place);
    every_operation::<f64>(group, count, ops, in_place);
    every_operation::<f16>(group, count, ops, in_place);
    every_operation::<bf16>(group, count, ops, in_place);
    every_operation::<i8>(group, count, ops, in_place);
    every_operation::<u8>(group, count, ops, in_place);
    every_operation::<i32>(group, count, ops, in_place);
    every_operation::<u32>(group, count, ops, in_place);
    every_operation::<i64>(group, count, ops, in_place);
    every_operation::<u64>(group, count, ops, in_place);
}

/// Runs the suite on ranks that are threads; on GPUs, each has its own.
///
/// # Panics
/// When a value is wrong or a call fails.
pub fn conform(backend: BackendChoice, world_size: usize) {
    with_ranks(&config(backend), world_size, |mut manager: ProcessGroupManager| {
        run(manager.world());
        manager.finalize().unwrap();
    });
}

/// Runs the suite on one rank of a group. Every rank calls this.
///
/// # Panics
/// When a value is wrong or a call fails.
pub fn run(group: &mut ProcessGroup) {
    let world_size = group.world_size();
    for path in paths(group) {
        group.force_path(path).unwrap();
        for count in LENGTHS {
            all_types(group, count, ReduceOp::ALL, &[true, false]);
        }
        every_operation::<f32>(group, LONG / 8, &[ReduceOp::Sum], &[true, false]);
    }
    // The long one: as a vector, and as chunks that together are as long. Every type and operation once.
    group.force_path(None).unwrap();
    all_types(group, LONG.div_ceil(world_size), &[ReduceOp::Avg], &[world_size.is_multiple_of(2)]);
    long_vectors::<f32>(group);
    long_vectors::<f64>(group);
    long_vectors::<f16>(group);
    long_vectors::<bf16>(group);
    long_vectors::<i8>(group);
    long_vectors::<u8>(group);
    long_vectors::<i32>(group);
    long_vectors::<u32>(group);
    long_vectors::<i64>(group);
    long_vectors::<u64>(group);
}

fn long_vectors<T: Small>(group: &mut ProcessGroup) {
    let (n, me) = (group.world_size(), group.rank().index());
    let op = ReduceOp::Sum;
    let mut x = put(group, &make(LONG, |i| T::small(operand(op, me, i))));
    group.all_reduce(&mut x, op).unwrap();
    check(group, &format!("long all_reduce of {}", T::DTYPE), &x, |i| reduced(op, n, i));
    let root = Rank(n as u32 - 1);
    let mut x = put(group, &make(LONG, |i| if me + 1 == n { letter::<T>(me, i) } else { poison() }));
    group.broadcast(&mut x, root).unwrap();
    check(group, &format!("long broadcast of {}", T::DTYPE), &x, |i| letter(n - 1, i));
}

/// The backend's own choice, and every path it has.
fn paths(group: &ProcessGroup) -> Vec<Option<Path>> {
    std::iter::once(None).chain(group.paths().into_iter().map(Some)).collect()
}
