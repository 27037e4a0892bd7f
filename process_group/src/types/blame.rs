//! *Pure*: the rank that a call blames at its deadline.

use crate::types::rank::Rank;

/// Returns the unresponsive rank that explains a timeout, if there is one: the first silent rank that is missing, or any silent
/// rank if no rank is missing. A silent rank that has done its part does not explain why another one is missing.
pub(crate) fn unresponsive(silent: impl IntoIterator<Item = Rank>, missing: &[Rank]) -> Option<Rank> {
    silent.into_iter().find(|rank| missing.is_empty() || missing.contains(rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_rank_is_to_blame_unless_only_others_are_missing() {
        let ranks = |ranks: &[u32]| ranks.iter().copied().map(Rank).collect::<Vec<_>>();
        for (silent, missing, blamed) in [
            (&[][..], &[][..], None),
            (&[], &[3], None),
            (&[2], &[], Some(2)),
            (&[2], &[2, 3], Some(2)),
            (&[2], &[3], None),
            (&[1, 3], &[3], Some(3)),
        ] {
            assert_eq!(
                unresponsive(ranks(silent), &ranks(missing)),
                blamed.map(Rank),
                "{silent:?} {missing:?}"
            );
        }
    }
}
