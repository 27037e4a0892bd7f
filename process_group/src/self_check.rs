//! Before a group is used: an all-reduce on every path, with every value checked.

use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::operation::ReduceOp;

/// Elements: one that goes as whole vectors and one that is cut, neither of which divides evenly.
const LENGTHS: [usize; 2] = [257, 4099];

pub(crate) fn run(group: &mut ProcessGroup) -> Result<()> {
    if group.device().is_some() && group.world_size() > 1 {
        // GPUs connect pair by pair when they are first used; then a message needs no answer to be set up.
        let token = vec![0u8; group.world_size()];
        let (from, mut to) = (group.upload(&token)?, group.upload(&token)?);
        group.all_to_all_into(&from, &mut to)?;
        group.synchronize()?;
    }
    for path in group.paths() {
        group.force_path(Some(path))?;
        for length in LENGTHS {
            let (rank, n) = (group.rank().index(), group.world_size());
            // Small integers: their sum in f32 is exact in any order, and differs for each element and missing rank.
            let values: Vec<f32> = (0..length).map(|i| ((rank + 1) * (i % 97 + 1)) as f32).collect();
            let mut placed = group.upload(&values)?;
            group.all_reduce(&mut placed, ReduceOp::Sum)?;
            let values = group.download(&placed)?;
            let ranks = n * (n + 1) / 2;
            let wrong = (0..length).find(|i| values[*i] != (ranks * (i % 97 + 1)) as f32);
            if let Some(i) = wrong {
                return Err(Error::SelfCheck {
                    path: path.to_string(),
                    reason: format!(
                        "element {i} of an all-reduce of {length} f32 among {n} ranks is {}, not {}",
                        values[i],
                        ranks * (i % 97 + 1)
                    ),
                });
            }
        }
    }
    group.force_path(None)
}
