//! Which part of a dimension belongs to which rank. Pure: numbers in, ranges out.
//!
//! A cut is given as one range for each rank, so that a root which sends weights away computes the same cuts as
//! the ranks that receive them.

use std::ops::Range;

/// The vocabulary is padded to a multiple of this for each rank, in the embedding and in the head alike.
pub const VOCABULARY_MULTIPLE: usize = 64;

/// Why a dimension cannot be shared out among so many ranks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// A dimension without an equal share for each rank.
    #[error("world size {world_size} does not divide {total} {what}")]
    Uneven {
        /// What the dimension counts.
        what: String,
        /// Its length.
        total: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// Query heads that cannot be grouped by key/value head.
    #[error("{kv} key/value heads do not divide {query} attention heads")]
    HeadGroups {
        /// Query heads.
        query: usize,
        /// Key and value heads.
        kv: usize,
    },
    /// More ranks than key/value heads, and not a multiple.
    #[error(
        "world size {world_size} is not a multiple of {kv} key/value heads, so they cannot be replicated evenly"
    )]
    Replicas {
        /// Key and value heads.
        kv: usize,
        /// Number of ranks.
        world_size: usize,
    },
}

/// Equal consecutive shares of `total`, one for each rank.
///
/// # Errors
/// When `world_size` does not divide `total`; `what` names the dimension in the message.
pub fn even(what: &str, total: usize, world_size: usize) -> Result<Vec<Range<usize>>, ShardError> {
    if world_size == 0 || !total.is_multiple_of(world_size) {
        return Err(ShardError::Uneven { what: what.into(), total, world_size });
    }
    let share = total / world_size;
    Ok((0..world_size).map(|rank| rank * share..(rank + 1) * share).collect())
}

/// The attention heads of one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Heads {
    /// Its query heads.
    pub query: Range<usize>,
    /// The key and value heads that those attend to.
    pub kv: Range<usize>,
}

/// Attention heads of every rank.
///
/// Query heads are cut evenly. KV heads are cut too while there are enough of them; otherwise each KV head is held by
/// `world_size / kv_heads` consecutive ranks, those whose query heads attend to it.
///
/// # Errors
/// When `world_size` does not divide the query heads, when it neither divides the KV heads nor is a multiple of them,
/// or when the KV heads do not divide the query heads. Each says which.
pub fn heads(query: usize, kv: usize, world_size: usize) -> Result<Vec<Heads>, ShardError> {
    if kv == 0 || !query.is_multiple_of(kv) {
        return Err(ShardError::HeadGroups { query, kv });
    }
    let queries = even("attention heads", query, world_size)?;
    if world_size <= kv {
        let kvs = even("key/value heads", kv, world_size)?;
        return Ok(queries.into_iter().zip(kvs).map(|(query, kv)| Heads { query, kv }).collect());
    }
    if !world_size.is_multiple_of(kv) {
        return Err(ShardError::Replicas { kv, world_size });
    }
    let replicas = world_size / kv;
    let with_kv = |(rank, query)| Heads { query, kv: rank / replicas..rank / replicas + 1 };
    Ok(queries.into_iter().enumerate().map(with_kv).collect())
}

/// The entries of a padded vocabulary that one rank holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VocabularyShard {
    /// All of its entries, padding included.
    pub padded: Range<usize>,
    /// Those that exist.
    pub real: Range<usize>,
}

/// The vocabulary with padding: the next multiple of [`VOCABULARY_MULTIPLE`] × `world_size`.
pub fn padded_vocabulary(vocabulary: usize, world_size: usize) -> usize {
    vocabulary.next_multiple_of(VOCABULARY_MULTIPLE * world_size)
}

/// The vocabulary of every rank.
pub fn vocabulary(vocabulary: usize, world_size: usize) -> Vec<VocabularyShard> {
    let share = padded_vocabulary(vocabulary, world_size) / world_size;
    (0..world_size)
        .map(|rank| {
            let padded = rank * share..(rank + 1) * share;
            let real = padded.start.min(vocabulary)..padded.end.min(vocabulary);
            VocabularyShard { padded, real }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Whether the ranges cover `0..total` in order, without gap or overlap.
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
            let ranges = even("rows", share * world, world).unwrap();
            prop_assert!(ranges.iter().all(|r| r.len() == share));
            prop_assert!(tiles(ranges, share * world));
        }

        #[test]
        fn what_does_not_divide_is_refused_with_its_name(total in 1usize..500, world in 2usize..17) {
            prop_assume!(total % world != 0);
            let message = even("rows", total, world).unwrap_err().to_string();
            let expected = format!("world size {world} does not divide {total} rows");
            prop_assert!(message.contains(&expected));
        }

        #[test]
        fn query_heads_tile_and_each_rank_holds_just_the_kv_heads_they_need(
            kv in 1usize..9, ratio in 1usize..9, world in 1usize..65,
        ) {
            let query = kv * ratio;
            let legal = query % world == 0 && (kv % world == 0 || world % kv == 0);
            let cut = heads(query, kv, world);
            prop_assert_eq!(cut.is_ok(), legal);
            if let Ok(cut) = cut {
                prop_assert!(tiles(cut.iter().map(|h| h.query.clone()), query));
                for h in &cut {
                    prop_assert_eq!(h.kv.start, h.query.start / ratio);
                    prop_assert_eq!(h.kv.end, (h.query.end - 1) / ratio + 1);
                }
                if world <= kv {
                    prop_assert!(tiles(cut.iter().map(|h| h.kv.clone()), kv));
                } else {
                    for head in 0..kv {
                        prop_assert_eq!(cut.iter().filter(|h| h.kv == (head..head + 1)).count(), world / kv);
                    }
                }
            }
        }

        #[test]
        fn vocabulary_shards_tile_the_padded_and_the_real_vocabulary(size in 1usize..200_000, world in 1usize..17) {
            let padded = padded_vocabulary(size, world);
            prop_assert!(padded.is_multiple_of(64 * world) && padded >= size && padded - size < 64 * world);
            let cut = vocabulary(size, world);
            prop_assert!(tiles(cut.iter().map(|v| v.padded.clone()), padded));
            prop_assert!(tiles(cut.iter().map(|v| v.real.clone()), size));
            prop_assert!(cut.iter().all(|v| v.padded.len() == padded / world));
        }
    }

    #[test]
    fn the_two_head_rules_are_reported_separately() {
        assert!(heads(8, 4, 3).unwrap_err().to_string().contains("does not divide 8 attention heads"));
        assert!(heads(12, 4, 3).unwrap_err().to_string().contains("does not divide 4 key/value heads"));
        assert!(heads(12, 4, 6).unwrap_err().to_string().contains("not a multiple of 4 key/value heads"));
        assert!(heads(10, 4, 1).unwrap_err().to_string().contains("4 key/value heads do not divide 10"));
        assert!(heads(8, 8, 0).is_err());
    }
}
