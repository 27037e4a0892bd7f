//! The shard of a dimension that belongs to each rank. Pure.
//!
//! Every function returns the ranges of all ranks.

use std::ops::Range;

/// Each rank's share of the vocabulary is padded to a multiple of this, in the embedding and in the head.
pub const VOCABULARY_MULTIPLE: usize = 64;

/// The reason for which a dimension cannot be sharded over a number of ranks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// A dimension without an equal share for each rank.
    #[error("world size {world_size} does not divide {total} {what}")]
    Uneven {
        /// The quantity that the dimension counts.
        what: String,
        /// Its length.
        total: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// Query heads that cannot be grouped by key/value head.
    #[error("{kv} key/value heads do not divide {query} attention heads")]
    HeadGroups {
        /// Number of query heads.
        query: usize,
        /// Number of key and value heads.
        kv: usize,
    },
    /// More ranks than key/value heads, and not a multiple.
    #[error(
        "world size {world_size} is not a multiple of {kv} key/value heads, so they cannot be replicated evenly"
    )]
    Replicas {
        /// Number of key and value heads.
        kv: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// A rank that is none of those that share a layer.
    #[error(
        "there is no rank {rank} of {world_size}: ranks count from 0; pass the rank and the world size of one group"
    )]
    NoRank {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// Ranks that would not add whole subtrees of a sum.
    #[error(
        "model.numerics = invariant adds a sum of {leaves} parts as a tree, and each of {world_size} ranks would not add a whole \
         subtree of it"
    )]
    Subtrees {
        /// Number of parts of the sum.
        leaves: usize,
        /// Number of ranks.
        world_size: usize,
    },
}

/// Divides `total` into equal consecutive ranges, one for each rank.
///
/// # Errors
/// Returns an error if `world_size` does not divide `total`; `what` names the dimension in the message.
pub fn split_evenly(what: &str, total: usize, world_size: usize) -> Result<Vec<Range<usize>>, ShardError> {
    if world_size == 0 || !total.is_multiple_of(world_size) {
        return Err(ShardError::Uneven { what: what.into(), total, world_size });
    }
    let share = total / world_size;
    Ok((0..world_size).map(|rank| rank * share..(rank + 1) * share).collect())
}

/// Divides the leaves of a sum over all ranks, and returns the number of each. The sum adds neighbours in pairs while their number
/// is even, and then one after the other. Each rank adds one subtree, so that the whole sum has the same order with every legal
/// number of ranks.
///
/// # Errors
/// Returns an error if `world_size` does not divide the leaves, or if the leaves of a rank are no subtree.
pub fn split_leaves(leaves: usize, world_size: usize) -> Result<usize, ShardError> {
    if world_size > 0 && leaves.is_multiple_of(world_size) {
        let share = leaves / world_size;
        if share.is_power_of_two() || world_size == 1 {
            return Ok(share);
        }
    }
    Err(ShardError::Subtrees { leaves, world_size })
}

/// The attention heads of one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeadShard {
    /// Its query heads.
    pub query: Range<usize>,
    /// The key and value heads that its query heads attend to.
    pub kv: Range<usize>,
}

/// Divides the attention heads over all ranks.
///
/// Query heads are split evenly. KV heads are also split, as long as there is one for each rank. Otherwise
/// `world_size / kv_heads` consecutive ranks hold each KV head: those whose query heads attend to it.
///
/// # Errors
/// Returns an error if `world_size` does not divide the query heads, if it neither divides the KV heads nor is a multiple of
/// them, or if the KV heads do not divide the query heads.
pub fn split_heads(query: usize, kv: usize, world_size: usize) -> Result<Vec<HeadShard>, ShardError> {
    if kv == 0 || !query.is_multiple_of(kv) {
        return Err(ShardError::HeadGroups { query, kv });
    }
    let queries = split_evenly("attention heads", query, world_size)?;
    if world_size <= kv {
        let kvs = split_evenly("key/value heads", kv, world_size)?;
        return Ok(queries.into_iter().zip(kvs).map(|(query, kv)| HeadShard { query, kv }).collect());
    }
    if !world_size.is_multiple_of(kv) {
        return Err(ShardError::Replicas { kv, world_size });
    }
    let replicas = world_size / kv;
    let with_kv = |(rank, query)| HeadShard { query, kv: rank / replicas..rank / replicas + 1 };
    Ok(queries.into_iter().enumerate().map(with_kv).collect())
}

/// The entries of a padded vocabulary that one rank holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VocabularyShard {
    /// All of its entries, including padding.
    pub padded: Range<usize>,
    /// The entries that are not padding.
    pub real: Range<usize>,
}

/// Returns the length of the vocabulary with padding: the next multiple of [`VOCABULARY_MULTIPLE`] × `world_size`.
///
/// # Errors
/// Returns an error if there is none: without ranks, or above the largest number.
pub fn padded_vocabulary(vocabulary: usize, world_size: usize) -> Result<usize, ShardError> {
    let multiple = VOCABULARY_MULTIPLE.checked_mul(world_size);
    let padded = multiple.and_then(|multiple| vocabulary.checked_next_multiple_of(multiple));
    padded.ok_or_else(|| ShardError::Uneven {
        what: "entries of a vocabulary with padding".into(),
        total: vocabulary,
        world_size,
    })
}

/// Divides a padded vocabulary over all ranks.
///
/// # Errors
/// Returns the error of [`padded_vocabulary`].
pub fn split_vocabulary(vocabulary: usize, world_size: usize) -> Result<Vec<VocabularyShard>, ShardError> {
    let share = padded_vocabulary(vocabulary, world_size)? / world_size;
    let shards = (0..world_size)
        .map(|rank| {
            let padded = rank * share..(rank + 1) * share;
            let real = padded.start.min(vocabulary)..padded.end.min(vocabulary);
            VocabularyShard { padded, real }
        })
        .collect();
    Ok(shards)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns true if the ranges cover `0..total` in order, without gap or overlap.
    fn tiles(ranges: impl IntoIterator<Item = Range<usize>>, total: usize) -> bool {
        let mut end = 0;
        ranges.into_iter().all(|r| {
            let fits = r.start == end && r.end >= r.start;
            end = r.end;
            fits
        }) && end == total
    }

    proptest! {
        #[test]
        fn even_shares_tile_the_dimension(share in 0usize..500, world in 1usize..17) {
            let ranges = split_evenly("rows", share * world, world).unwrap();
            prop_assert!(ranges.iter().all(|r| r.len() == share));
            prop_assert!(tiles(ranges, share * world));
        }

        #[test]
        fn what_does_not_divide_is_refused_with_its_name(total in 1usize..500, world in 2usize..17) {
            prop_assume!(total % world != 0);
            let message = split_evenly("rows", total, world).unwrap_err().to_string();
            let expected = format!("world size {world} does not divide {total} rows");
            prop_assert!(message.contains(&expected));
        }

        #[test]
        fn query_heads_tile_and_each_rank_holds_just_the_kv_heads_they_need(
            kv in 1usize..9, ratio in 1usize..9, world in 1usize..65,
        ) {
            let query = kv * ratio;
            let legal = query % world == 0 && (kv % world == 0 || world % kv == 0);
            let shares = split_heads(query, kv, world);
            prop_assert_eq!(shares.is_ok(), legal);
            if let Ok(shares) = shares {
                prop_assert!(tiles(shares.iter().map(|h| h.query.clone()), query));
                for h in &shares {
                    prop_assert_eq!(h.kv.start, h.query.start / ratio);
                    prop_assert_eq!(h.kv.end, (h.query.end - 1) / ratio + 1);
                }
                if world <= kv {
                    prop_assert!(tiles(shares.iter().map(|h| h.kv.clone()), kv));
                } else {
                    for head in 0..kv {
                        prop_assert_eq!(shares.iter().filter(|h| h.kv == (head..head + 1)).count(), world / kv);
                    }
                }
            }
        }

        #[test]
        fn vocabulary_shards_tile_the_padded_and_the_real_vocabulary(size in 1usize..200_000, world in 1usize..17) {
            let padded = padded_vocabulary(size, world).unwrap();
            prop_assert!(padded.is_multiple_of(64 * world) && padded >= size && padded - size < 64 * world);
            let shares = split_vocabulary(size, world).unwrap();
            prop_assert!(tiles(shares.iter().map(|v| v.padded.clone()), padded));
            prop_assert!(tiles(shares.iter().map(|v| v.real.clone()), size));
            prop_assert!(shares.iter().all(|v| v.padded.len() == padded / world));
        }
    }

    #[test]
    fn the_two_head_rules_are_reported_separately() {
        assert!(split_heads(8, 4, 3).unwrap_err().to_string().contains("does not divide 8 attention heads"));
        assert!(split_heads(12, 4, 3).unwrap_err().to_string().contains("does not divide 4 key/value heads"));
        assert!(
            split_heads(12, 4, 6).unwrap_err().to_string().contains("not a multiple of 4 key/value heads")
        );
        assert!(
            split_heads(10, 4, 1).unwrap_err().to_string().contains("4 key/value heads do not divide 10")
        );
        assert!(split_heads(8, 8, 0).is_err());
    }

    #[test]
    fn vocabularies_without_ranks_or_above_the_largest_number_are_refused() {
        for (vocabulary, world_size) in [(100, 0), (0, 0), (usize::MAX, 2), (100, usize::MAX)] {
            assert!(split_vocabulary(vocabulary, world_size).is_err(), "{vocabulary} over {world_size}");
        }
    }
}
