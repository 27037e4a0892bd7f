//! Checks a group before its use: every path with every operation that it supports, every element type, and a size on each side of
//! each threshold, with every value compared.

use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::paths::Path;
use crate::types::dtype::{Element, for_each_dtype};
use crate::types::operation::{Operation, ReduceOp};
use crate::types::rank::Rank;

/// Numbers of elements: one that goes in whole vectors and one that is split, neither of which divides evenly.
const LENGTHS: [usize; 2] = [257, 4099];
/// The same on GPUs, where NCCL changes its protocol with the size: 1 MiB and 16 MiB of f32.
const LARGE: [usize; 2] = [1 << 18, 1 << 22];
/// Maximum threshold that is crossed: moving more bytes would take longer than a check may. The paths above it are checked with
/// smaller sizes.
const MOST_BYTES: usize = 4 << 20;

pub(crate) fn run(group: &mut ProcessGroup) -> Result<()> {
    if group.device().is_some() && group.world_size() > 1 {
        // GPUs connect in pairs at their first use; after that, the set-up of a message needs no answer.
        let token = vec![0u8; group.world_size()];
        let (from, mut to) = (group.upload(&token)?, group.upload(&token)?);
        group.all_to_all_into(&from, &mut to)?;
        group.synchronize()?;
    }
    for path in group.paths() {
        group.force_path(Some(path))?;
        for length in LENGTHS {
            all_reduce::<f32>(group, length, Some(path))?;
        }
        if group.world_size() > 1 {
            operations(group, path)?;
        }
    }
    group.force_path(None)?;
    if group.world_size() > 1 {
        dtypes(group)?;
        // Nothing is below a threshold of 0.
        let bytes = group.thresholds().into_iter().filter(|bytes| (1..=MOST_BYTES).contains(bytes));
        let around = bytes.flat_map(|bytes| [bytes.div_ceil(4) - 1, bytes.div_ceil(4)]);
        let large = LARGE.into_iter().filter(|_| group.device().is_some());
        for length in around.chain(large).collect::<Vec<_>>() {
            all_reduce::<f32>(group, length, None)?;
        }
    }
    Ok(())
}

macro_rules! of_each {
    ($($variant:ident, $type:ty, $name:literal;)*) => {
        /// Runs an all-reduce of every element type, on the paths that the group chooses.
        fn dtypes(group: &mut ProcessGroup) -> Result<()> {
            $(all_reduce::<$type>(group, LENGTHS[0], None)?;)*
            Ok(())
        }
    };
}
for_each_dtype!(of_each);

/// Returns a rank's summand of element `i`: it is non-zero for one element in `n`. So the sum is exact in every type, and a missing
/// or misplaced rank is detected.
const fn part(i: usize, rank: usize, n: usize) -> u8 {
    if i % n == rank { sum(i) } else { 0 }
}

/// Returns the sum of all ranks' parts.
const fn sum(i: usize) -> u8 {
    (i % 89) as u8 + 1
}

fn value<T: TryFrom<u8>>(small: u8) -> Result<T> {
    T::try_from(small).map_err(|_| Error::Configuration(format!("{small} is no value of an element type")))
}

fn all_reduce<T: Element + TryFrom<u8>>(
    group: &mut ProcessGroup,
    length: usize,
    path: Option<Path>,
) -> Result<()> {
    let (rank, n) = (group.rank().index(), group.world_size());
    let values: Vec<T> = (0..length).map(|i| value(part(i, rank, n))).collect::<Result<_>>()?;
    let mut placed = group.upload(&values)?;
    group.all_reduce(&mut placed, ReduceOp::Sum)?;
    let values = group.download(&placed)?;
    let operation = Operation::AllReduce(ReduceOp::Sum);
    let path = match path {
        Some(path) => path,
        None => group.explain(operation, T::DTYPE, length)?.path,
    };
    check(&values, 0, |i| value(sum(i)), (path, operation))
}

/// Runs every other operation of a path, with f32.
fn operations(group: &mut ProcessGroup, path: Path) -> Result<()> {
    let (me, n) = (group.rank(), group.world_size());
    let (rank, length) = (me.index(), LENGTHS[0]);
    let root = Rank(n as u32 - 1);
    let all = [
        Operation::Broadcast { root },
        Operation::Reduce { op: ReduceOp::Sum, root },
        Operation::AllGather,
        Operation::ReduceScatter(ReduceOp::Sum),
        Operation::Gather { root },
        Operation::Scatter { root },
        Operation::AllToAll,
    ];
    // A mark for each rank and element, and the sum of all ranks' marks.
    let mark = |rank: usize, i: usize| ((rank + 1) * (i % 97 + 1)) as f32;
    let sum = |i: usize| (n * (n + 1) / 2 * (i % 97 + 1)) as f32;
    for operation in all.into_iter().filter(|operation| path.suits(*operation)) {
        let count = if operation.is_chunked() { n * length } else { length };
        let values: Vec<f32> = (0..count).map(|i| mark(rank, i)).collect();
        let mut placed = group.upload(&values)?;
        match operation {
            Operation::Broadcast { root } => group.broadcast(&mut placed, root)?,
            Operation::Reduce { op, root } => group.reduce(&mut placed, op, root)?,
            Operation::AllGather => group.all_gather(&mut placed)?,
            Operation::ReduceScatter(op) => group.reduce_scatter(&mut placed, op)?,
            Operation::Gather { root } => group.gather(&mut placed, root)?,
            Operation::Scatter { root } => group.scatter(&mut placed, root)?,
            _ => group.all_to_all(&mut placed)?,
        }
        let values = group.download(&placed)?;
        let own = rank * length;
        let with = (path, operation);
        match operation {
            Operation::Broadcast { root } => check(&values, 0, |i| Ok(mark(root.index(), i)), with)?,
            Operation::Reduce { .. } if me == root => check(&values, 0, |i| Ok(sum(i)), with)?,
            Operation::ReduceScatter(_) => check(&values[own..own + length], own, |i| Ok(sum(i)), with)?,
            Operation::Scatter { root } => {
                check(&values[own..own + length], own, |i| Ok(mark(root.index(), i)), with)?;
            }
            Operation::AllGather => check(&values, 0, |i| Ok(mark(i / length, i)), with)?,
            Operation::Gather { .. } if me == root => {
                check(&values, 0, |i| Ok(mark(i / length, i)), with)?;
            }
            // Chunk `p` is the chunk that `p` had at this rank's position.
            Operation::AllToAll => {
                check(&values, 0, |i| Ok(mark(i / length, own + i % length)), with)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Compares values with their expected values. The first is element `first` of the buffer.
fn check<T: Element>(
    values: &[T],
    first: usize,
    expected: impl Fn(usize) -> Result<T>,
    (path, operation): (Path, Operation),
) -> Result<()> {
    for (i, value) in (first..).zip(values) {
        let expected = expected(i)?;
        if *value != expected {
            let reason = format!("element {i} of {operation} of {} is {value:?}, not {expected:?}", T::DTYPE);
            return Err(Error::SelfCheck { path: path.to_string(), reason });
        }
    }
    Ok(())
}
