//! The order in which sums with invariant numerics are added.

use pulp::{Arch, Simd, WithSimd};

use super::rows::vectorized;

/// Returns the place of a leaf among the sums that are unfinished when it comes. Leaves come one after another, and only these sums
/// are kept.
pub(super) const fn place(leaf: usize, leaves: usize) -> usize {
    let subtree = 1 << leaves.trailing_zeros();
    (leaf % subtree).count_ones() as usize + (leaf >= subtree) as usize
}

/// Returns the number of places.
pub(super) const fn places(leaves: usize) -> usize {
    let subtree: usize = 1 << leaves.trailing_zeros();
    subtree.trailing_zeros() as usize + 1 + (leaves > subtree) as usize
}

vectorized! {
    /// Adds a leaf, which is in its [`place`], to the sums that it completes. After the last leaf, the first place has the sum of all.
    /// Each place has `length` elements. Neighbours are added in pairs while their number is even, then one after the other. See
    /// [`split_leaves`](crate::shard::split_leaves).
    pub(super) fn add<'a>(sums: &'a mut [f32], length: usize, leaf: usize, leaves: usize) {
        for to in (place(leaf + 1, leaves) - 1..place(leaf, leaves)).rev() {
            let (sum, term) = sums[to * length..(to + 2) * length].split_at_mut(length);
            for (sum, term) in sum.iter_mut().zip(term) {
                *sum += *term;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shard::split_leaves;

    fn tree(terms: &[f32], length: usize) -> Vec<f32> {
        let leaves = terms.len() / length;
        let mut sums = vec![f32::NAN; places(leaves) * length];
        for (leaf, term) in terms.chunks_exact(length).enumerate() {
            sums[place(leaf, leaves) * length..][..length].copy_from_slice(term);
            add(Arch::new(), &mut sums, length, leaf, leaves);
        }
        sums.truncate(length);
        sums
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
            let whole = tree(&terms, length);
            for ranks in 1..=leaves {
                let Ok(share) = split_leaves(leaves, ranks) else { continue };
                let sums: Vec<_> = terms.chunks(share * length).flat_map(|mine| tree(mine, length)).collect();
                prop_assert_eq!(&tree(&sums, length), &whole, "{} ranks", ranks);
            }
        }
    }

    #[test]
    fn another_order_has_other_bits() {
        let terms: Vec<f32> = (0..8).map(|i| 1.0 / (i as f32 * 3.0 + 1.0)).collect();
        let whole = tree(&terms, 1);
        let swapped = |a: usize, b: usize| {
            let mut terms = terms.clone();
            terms.swap(a, b);
            tree(&terms, 1)
        };
        // Addition commutes, so only a term that leaves its pair changes the order.
        assert_eq!(swapped(0, 1), whole);
        assert!((1..7).any(|at| swapped(at, at + 1) != whole));
    }
}
