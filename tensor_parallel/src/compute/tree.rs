//! The order in which sums with invariant numerics are added.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

use pulp::{Arch, Simd, WithSimd};

use super::rows::vectorized;

vectorized! {
    /// Adds terms of `length` elements each, and leaves the sum in the first: neighbours in pairs while the number of terms is even,
    /// then one after the other. See [`split_leaves`](crate::shard::split_leaves).
    pub(super) fn sum<'a>(terms: &'a mut [f32], length: usize) {
        let mut step = length;
        while (terms.len() / step).is_multiple_of(2) {
            for pair in terms.chunks_exact_mut(2 * step) {
                let (sum, term) = pair.split_at_mut(step);
                add(&mut sum[..length], &term[..length]);
            }
            step *= 2;
        }
        let (sum, others) = terms.split_at_mut(step);
        for term in others.chunks_exact(step) {
            add(&mut sum[..length], &term[..length]);
        }
    }
}

#[inline(always)]
fn add(sum: &mut [f32], term: &[f32]) {
    for (sum, term) in sum.iter_mut().zip(term) {
        *sum += term;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shard::split_leaves;

    fn tree(mut terms: Vec<f32>, length: usize) -> Vec<f32> {
        sum(Arch::new(), &mut terms, length);
        terms.truncate(length);
        terms
    }

    proptest! {
        #[test]
        fn ranks_that_add_subtrees_and_then_their_sums_have_the_bits_of_one_rank(
            leaves in 1usize..25, length in 1usize..40, seed in any::<u32>(),
        ) {
            let value = |i: usize| {
                let mixed = (i as u32 ^ seed).wrapping_mul(0x9E37_79B9);
                (mixed >> 8) as f32 * (if mixed & 1 == 0 { 1e-3 } else { -1e3 })
            };
            let terms: Vec<f32> = (0..leaves * length).map(value).collect();
            let whole = tree(terms.clone(), length);
            for ranks in 1..=leaves {
                let Ok(share) = split_leaves(leaves, ranks) else { continue };
                let sums = terms.chunks(share * length).flat_map(|mine| tree(mine.to_vec(), length)).collect();
                prop_assert_eq!(&tree(sums, length), &whole, "{} ranks", ranks);
            }
        }
    }

    #[test]
    fn another_order_has_other_bits() {
        let terms: Vec<f32> = (0..8).map(|i| 1.0 / (i as f32 * 3.0 + 1.0)).collect();
        let whole = tree(terms.clone(), 1);
        let swapped = |a: usize, b: usize| {
            let mut terms = terms.clone();
            terms.swap(a, b);
            tree(terms, 1)
        };
        // Addition commutes, so only a term that leaves its pair changes the order.
        assert_eq!(swapped(0, 1), whole);
        assert!((1..7).any(|at| swapped(at, at + 1) != whole));
    }
}
