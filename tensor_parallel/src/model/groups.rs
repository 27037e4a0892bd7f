//! The process groups that a model is divided over.

use ryzanstein_process_group::{ProcessGroup, ProcessGroupManager, Rank};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::stage::Stage;
use crate::error::Result;

/// The process groups that a model is divided over, which its calls borrow.
///
/// A [`ProcessGroup`] alone is a model of one stage, each layer of which its members share. A [`ProcessGroupManager`] divides a
/// model as its layout says: tensor × pipeline.
pub trait ModelGroups {
    /// The ranks that share each layer with this one.
    fn tensor(&mut self) -> &mut ProcessGroup;

    /// The stages of this rank's pipeline, first stage first; `None` if there is only one.
    fn stages(&mut self) -> Option<&mut ProcessGroup>;

    /// All ranks that load the model, replicas too.
    fn world(&mut self) -> &mut ProcessGroup;
}

impl ModelGroups for ProcessGroup {
    fn tensor(&mut self) -> &mut ProcessGroup {
        self
    }

    fn stages(&mut self) -> Option<&mut ProcessGroup> {
        None
    }

    fn world(&mut self) -> &mut ProcessGroup {
        self
    }
}

impl ModelGroups for ProcessGroupManager {
    fn tensor(&mut self) -> &mut ProcessGroup {
        self.tensor_parallel()
    }

    fn stages(&mut self) -> Option<&mut ProcessGroup> {
        Some(self.pipeline_parallel()).filter(|stages| stages.world_size() > 1)
    }

    fn world(&mut self) -> &mut ProcessGroup {
        self.world()
    }
}

/// This rank's stage.
pub(crate) fn stage_of(groups: &mut dyn ModelGroups) -> Stage {
    let of = |stages: &mut ProcessGroup| Stage { index: stages.rank().index(), count: stages.world_size() };
    groups.stages().map_or_else(Stage::default, of)
}

/// Waits for the GPU, if there is one, at most until the groups' timeout. A lost rank leaves values there that look like any
/// others, and only the groups can tell.
pub(crate) fn synchronize(groups: &mut dyn ModelGroups) -> Result<()> {
    groups.tensor().synchronize()?;
    if let Some(stages) = groups.stages() {
        stages.synchronize()?;
    }
    Ok(())
}

/// Every rank's value, with its global rank, stage by stage.
pub(crate) fn all_gather<T>(value: &T, groups: &mut dyn ModelGroups) -> Result<Vec<(Rank, T)>>
where
    T: Serialize + DeserializeOwned,
{
    let group = groups.tensor();
    let values = group.without_profiling(|group| group.all_gather_object(value))?;
    let all: Vec<(Rank, T)> = group.members().iter().copied().zip(values).collect();
    match groups.stages() {
        Some(stages) => {
            let all = stages.without_profiling(|stages| stages.all_gather_object(&all))?;
            Ok(all.into_iter().flatten().collect())
        }
        None => Ok(all),
    }
}

/// The value of the first rank of the first stage.
pub(crate) fn broadcast<T>(value: &T, groups: &mut dyn ModelGroups) -> Result<T>
where
    T: Serialize + DeserializeOwned,
{
    let of_stage = groups.tensor().broadcast_object(Some(value), Rank(0))?;
    match groups.stages() {
        Some(stages) => Ok(stages.broadcast_object(Some(&of_stage), Rank(0))?),
        None => Ok(of_stage),
    }
}
