//! The process groups over which a model is divided.

use ryzanstein_process_group::{ProcessGroup, ProcessGroupManager, Rank};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::stage::Stage;
use crate::error::Result;

/// The process groups over which a model is divided. Its calls borrow them.
///
/// A single [`ProcessGroup`] is a model of one stage, whose members share each layer. A [`ProcessGroupManager`] divides a model
/// as its layout specifies: tensor × pipeline.
#[diagnostic::on_unimplemented(
    message = "a model cannot run on `{Self}`",
    note = "pass a `ProcessGroup` or a `ProcessGroupManager`, such as `orchestrator.manager()`"
)]
pub trait ModelGroups {
    /// Returns the group of the ranks that share each layer with this one.
    fn tensor(&mut self) -> &mut ProcessGroup;

    /// Returns the group of the stages of this rank's pipeline, first stage first, or `None` if there is only one.
    fn stages(&mut self) -> Option<&mut ProcessGroup>;

    /// Returns the group of all ranks that load the model, including replicas.
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

/// Returns this rank's stage.
pub(crate) fn stage_of(groups: &mut dyn ModelGroups) -> Stage {
    let of = |stages: &mut ProcessGroup| Stage { index: stages.rank().index(), count: stages.world_size() };
    groups.stages().map_or_else(Stage::default, of)
}

/// Waits for the GPU, if there is one, at most until the timeout of the groups. After the loss of a rank, the values look valid,
/// and only the groups report the error.
pub(crate) fn synchronize(groups: &mut dyn ModelGroups) -> Result<()> {
    groups.tensor().synchronize()?;
    if let Some(stages) = groups.stages() {
        stages.synchronize()?;
    }
    Ok(())
}

/// Gathers every rank's value, with its global rank, stage by stage.
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

/// Broadcasts the value of the first rank of the first stage.
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
