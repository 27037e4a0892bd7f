//! Groups whose size is no power of two: the surplus ranks first send their vectors to partners, and last receive the results, as in
//! Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).

use super::build::Builder;
use super::program::Region;

/// Returns the largest power of two that is at most `n`.
pub(super) fn largest_power_of_two(n: usize) -> usize {
    1 << n.ilog2()
}

/// Reduces surplus ranks into partners. Returns the region of the rank's values after this, or `None` for a surplus rank, which then
/// only waits for the result.
pub(super) fn reduce_surplus(b: &mut Builder<'_>, power: usize) -> Option<Region> {
    let (input, output) = (b.input(b.all()), b.output(b.all()));
    if b.rank >= power {
        b.send(b.rank - power, input);
        b.receive(b.rank - power, output);
        return None;
    }
    if b.rank + power < b.n {
        let sources = b.pair(input, b.rank + power);
        b.reduce_into(output, sources, false);
        return Some(output);
    }
    Some(input)
}

pub(super) fn return_to_surplus(b: &mut Builder<'_>, power: usize) {
    if b.rank + power < b.n {
        b.send(b.rank + power, b.output(b.all()));
    }
}

/// Returns `Ok(messages)` for a surplus rank, and `Err(messages back to its surplus rank)` for the others.
pub(super) fn surplus_messages(rank: usize, n: usize) -> Result<usize, usize> {
    let power = largest_power_of_two(n);
    if rank >= power { Ok(1) } else { Err(usize::from(rank + power < n)) }
}

/// Returns the number of rounds that the surplus ranks add.
pub(super) fn surplus_rounds(n: usize) -> usize {
    if n.is_power_of_two() { 0 } else { 2 }
}
