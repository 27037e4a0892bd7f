//! Arithmetic of one rank. Layers hold weights and call the process group; [`Compute`] does all arithmetic.

mod attend;
mod batch;
mod captured_graph;
pub mod cuda;
mod exponential;
mod host;
mod operations;
mod product;
mod rows;
mod shapes;
mod tree;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::ProcessGroup;

pub(crate) use self::batch::MOST_POSITIONS;
pub use self::batch::{Batch, CHOSEN, PAGE_SIZE, SlotMapping};
pub use self::captured_graph::CapturedGraph;
pub use self::cuda::Cuda;
pub(crate) use self::exponential::exp;
pub use self::host::Host;
pub use self::operations::{AttentionCall, Compute, HeadNorms, LayerCache};
#[doc(hidden)]
pub use self::product::instruction_set;
use crate::error::Result;
use crate::threads;

/// Returns the arithmetic for a rank of a group whose members compute at the same time: on its GPU, or on its share of the CPUs
/// that it may use. Its numerics are those of the group.
///
/// # Errors
/// Returns an error if the group has a GPU that cannot compute.
pub fn for_group(group: &ProcessGroup) -> Result<Box<dyn Compute>> {
    for_ranks(group, group.numerics())
}

/// Returns the arithmetic of [`for_group`] with the numerics of another group, whose members are among those of `group`.
pub(crate) fn for_ranks(group: &ProcessGroup, numerics: Numerics) -> Result<Box<dyn Compute>> {
    let threads = threads::per_rank(group.sharing_cpus());
    match group.device() {
        Some(device) => Ok(Box::new(Cuda::with_numerics(device, threads, numerics)?)),
        None => Ok(Box::new(Host::with_numerics(threads, instruction_set::current(), numerics))),
    }
}

#[doc(hidden)]
/// Returns the name of the arithmetic of a rank: results have the same bits only with the same one.
pub fn arithmetic(group: &ProcessGroup) -> String {
    match group.device() {
        Some(device) => {
            let (major, minor) = device.info().capability;
            format!("sm_{major}{minor}")
        }
        None => instruction_set::current().to_string(),
    }
}

#[cfg(test)]
mod tests;
