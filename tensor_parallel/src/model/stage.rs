//! The layers that a rank holds if a model is divided into the stages of a pipeline. Pure.

use std::fmt;
use std::ops::Range;

/// One stage of a pipeline: consecutive layers. The first stage also holds the embedding, the last the final norm and the head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stage {
    /// Its number, from 0.
    pub index: usize,
    /// Number of stages.
    pub count: usize,
}

impl Default for Stage {
    /// Returns the only stage of an undivided model.
    fn default() -> Self {
        Self { index: 0, count: 1 }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {} of {}", self.index, self.count)
    }
}

impl Stage {
    /// Returns true if this is the first stage, which takes the tokens.
    pub const fn is_first(&self) -> bool {
        self.index == 0
    }

    /// Returns true if this is the last stage, which returns the logits.
    pub const fn is_last(&self) -> bool {
        matches!(self.count.checked_sub(self.index), Some(1))
    }

    /// Returns its share of `layers` layers. If they are not divisible, the earlier stages have one more, because the last also
    /// has the head. A stage that is none of the pipeline has no layers.
    pub fn layers(&self, layers: usize) -> Range<usize> {
        part(layers, self.index, self.count)
    }
}

/// Divides `total` into `parts` ranges of equal length. If it is not divisible, the earlier ones are longer by one.
pub(super) fn cut(total: usize, parts: usize) -> impl Iterator<Item = Range<usize>> {
    (0..parts).map(move |index| part(total, index, parts))
}

fn part(total: usize, index: usize, parts: usize) -> Range<usize> {
    if index >= parts {
        return total..total;
    }
    let (each, more) = (total / parts, total % parts);
    let start = index * each + index.min(more);
    start..start + each + usize::from(index < more)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn earlier_stages_have_the_layers_that_do_not_divide() {
        let layers =
            |count, all| (0..count).map(|index| Stage { index, count }.layers(all)).collect::<Vec<_>>();
        assert_eq!(layers(3, 8), [0..3, 3..6, 6..8]);
        assert_eq!(layers(3, 7), [0..3, 3..5, 5..7]);
        assert_eq!(Stage::default().layers(7), 0..7);
        for (index, count) in [(0, 0), (5, 2), (usize::MAX, 1)] {
            assert_eq!(Stage { index, count }.layers(7), 7..7);
        }
    }

    proptest! {
        #[test]
        fn stages_tile_the_layers_and_none_is_empty(count in 1usize..9, more in 0usize..40) {
            let layers = count + more;
            let parts: Vec<_> = cut(layers, count).collect();
            prop_assert!(parts.iter().all(|part| !part.is_empty()));
            prop_assert!(parts.iter().cloned().flatten().eq(0..layers));
        }
    }
}
