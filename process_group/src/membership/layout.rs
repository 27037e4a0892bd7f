//! The ranks of each group: tensor × pipeline × data parallel. Pure.

use std::fmt;

use ryzanstein_config::LayoutConfig;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::types::rank::Rank;

/// Sizes of the three dimensions; their product is the world size.
///
/// Tensor-parallel ranks are neighbours (`0..tp`), because they communicate most and neighbours share a host; pipeline stages come
/// next, data-parallel replicas last: `rank = (data × pp + pipeline) × tp + tensor`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Layout {
    /// Number of ranks that share each layer.
    pub tensor_parallel: usize,
    /// Number of stages over which the layers are spread.
    pub pipeline_parallel: usize,
    /// Number of copies of the whole.
    pub data_parallel: usize,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor_parallel, pipeline_parallel, data_parallel } = self;
        write!(
            f,
            "tensor_parallel {tensor_parallel} × pipeline_parallel {pipeline_parallel} × data_parallel {data_parallel}"
        )
    }
}

impl Layout {
    /// Fits the configured sizes to the world size: unless tensor parallelism is set, it gets the remaining factor.
    ///
    /// # Errors
    /// [`Error::Configuration`] when the product is not the world size, or there are no ranks.
    pub fn new(config: &LayoutConfig, world_size: usize) -> Result<Self> {
        let pipeline_parallel = config.pipeline_parallel.get() as usize;
        let data_parallel = config.data_parallel.get() as usize;
        let others = pipeline_parallel.saturating_mul(data_parallel);
        let tensor_parallel = config.tensor_parallel.map_or(world_size / others, |t| t.get() as usize);
        if world_size == 0 || tensor_parallel.checked_mul(others) != Some(world_size) {
            let tensor = config.tensor_parallel.map_or("what they leave".into(), |t| t.to_string());
            return Err(Error::Configuration(format!(
                "layout: pipeline_parallel {pipeline_parallel} × data_parallel {data_parallel} × tensor_parallel \
                 ({tensor}) do not make the {world_size} ranks there are; change the [layout] or the world size"
            )));
        }
        Ok(Self { tensor_parallel, pipeline_parallel, data_parallel })
    }

    /// Returns the tensor-parallel group of `rank`.
    pub fn tensor_group(&self, rank: Rank) -> Vec<Rank> {
        let first = rank.index() / self.tensor_parallel * self.tensor_parallel;
        (first..first + self.tensor_parallel).map(|r| Rank(r as u32)).collect()
    }

    /// Returns the pipeline of which `rank` is a stage, first stage first.
    pub fn pipeline_group(&self, rank: Rank) -> Vec<Rank> {
        let replica = self.tensor_parallel * self.pipeline_parallel;
        let first = rank.index() / replica * replica + rank.index() % self.tensor_parallel;
        (0..self.pipeline_parallel).map(|stage| Rank((first + stage * self.tensor_parallel) as u32)).collect()
    }

    /// Returns the ranks with the same weights as `rank`.
    pub fn data_group(&self, rank: Rank) -> Vec<Rank> {
        let replica = self.tensor_parallel * self.pipeline_parallel;
        let first = rank.index() % replica;
        (0..self.data_parallel).map(|copy| Rank((first + copy * replica) as u32)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout(t: usize, p: usize, d: usize) -> Layout {
        Layout { tensor_parallel: t, pipeline_parallel: p, data_parallel: d }
    }

    #[test]
    fn eight_ranks_as_two_by_two_by_two() {
        let numbers = |ranks: Vec<Rank>| ranks.into_iter().map(|r| r.0).collect::<Vec<_>>();
        let l = layout(2, 2, 2);
        assert_eq!(numbers(l.tensor_group(Rank(5))), [4, 5]);
        assert_eq!(numbers(l.pipeline_group(Rank(5))), [5, 7]);
        assert_eq!(numbers(l.data_group(Rank(5))), [1, 5]);
    }

    #[test]
    fn a_product_that_is_not_the_world_size_is_refused() {
        let config = LayoutConfig { pipeline_parallel: 3.try_into().unwrap(), ..LayoutConfig::default() };
        let message = Layout::new(&config, 4).unwrap_err().to_string();
        assert!(message.contains("pipeline_parallel 3") && message.contains("4 ranks"), "{message}");
        assert_eq!(Layout::new(&LayoutConfig::default(), 4).unwrap(), layout(4, 1, 1));
        assert!(Layout::new(&LayoutConfig::default(), 0).is_err());
        let most = u32::MAX.try_into().unwrap();
        let config =
            LayoutConfig { tensor_parallel: Some(most), pipeline_parallel: most, data_parallel: most };
        assert!(Layout::new(&config, 4).is_err());
    }

    proptest! {
        #[test]
        fn groups_of_each_dimension_cover_every_rank_once(t in 1..5usize, p in 1..5usize, d in 1..5usize) {
            let l = layout(t, p, d);
            for group_of in [Layout::tensor_group, Layout::pipeline_group, Layout::data_group] {
                for rank in Rank::all(t * p * d) {
                    let group = group_of(&l, rank);
                    prop_assert!(group.contains(&rank));
                    prop_assert!(group.iter().all(|other| group_of(&l, *other) == group));
                }
            }
        }
    }
}
