//! Calls in an existing group, or in a group that is made for each of them: the cost of not reusing groups.

use ryzanstein_config::Config;
use ryzanstein_process_group::device::Device;
use ryzanstein_process_group::{Buffer, BufferMut, Error, ProcessGroup, ProcessGroupManager, Rank};

use super::Start;
use super::paths::expected_path;
use crate::measure::{CallBuffers, Case, Figures, Gpu, Host, measure_calls};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::rendezvous::{Environment, process_environment};

/// Measures calls, each with its start. All ranks are on one host, and were started by our launcher.
pub(super) fn measure(orchestrator: &mut Orchestrator, start: Start, case: &Case) -> Result<Figures, Error> {
    let config = orchestrator.config().clone();
    let manager = orchestrator.manager();
    let ranks: Vec<Rank> = Rank::all(manager.roster().world_size()).collect();
    let device = manager.world().device().cloned();
    // Separates the calls, in a group of its own.
    let mut pacer = new_group(manager, &ranks)?;
    let path = expected_path(manager.world(), case)?;
    let environment = rank_environment(process_environment());
    let mut starter = Starter { start, manager, ranks, config, environment, device: device.clone() };
    let mut figures = match device {
        Some(device) => {
            let mut gpu = Gpu::new(device, false);
            measure_calls(&mut pacer, &mut gpu, case, &mut |pacer, slot| starter.call(pacer, slot, case))
        }
        None => {
            measure_calls(&mut pacer, &mut Host, case, &mut |pacer, slot| starter.call(pacer, slot, case))
        }
    }?;
    // The pacer's calls take another path.
    figures.path = path;
    Ok(figures)
}

struct Starter<'a> {
    start: Start,
    manager: &'a mut ProcessGroupManager,
    ranks: Vec<Rank>,
    config: Config,
    environment: Environment,
    device: Option<Device>,
}

impl Starter<'_> {
    fn call<M: Buffer + BufferMut>(
        &mut self,
        pacer: &mut ProcessGroup,
        slot: &mut CallBuffers<M>,
        case: &Case,
    ) -> Result<(), Error> {
        match self.start {
            Start::Reuse => case.what.call(self.manager.world(), slot, case.reduction),
            Start::NewGroup => {
                let mut group = new_group(self.manager, &self.ranks)?;
                case.what.call(&mut group, slot, case.reduction)?;
                // The GPU must have finished with the group before it is dropped.
                group.synchronize()
            }
            Start::Initialize => {
                // No rank may connect to the rendezvous of the previous call.
                pacer.barrier()?;
                let builder =
                    Orchestrator::builder().config(self.config.clone()).environment(self.environment.clone());
                let builder = match &self.device {
                    Some(device) => builder.device(device),
                    None => builder,
                };
                let mut rank = builder.initialize()?;
                case.what.call(rank.manager().world(), slot, case.reduction)?;
                rank.finalize()
            }
        }
    }
}

fn new_group(manager: &mut ProcessGroupManager, ranks: &[Rank]) -> Result<ProcessGroup, Error> {
    let group = manager.new_group(ranks)?;
    group.ok_or_else(|| Error::Invalid("a group of all ranks lacks this one".into()))
}

/// Returns the environment of a rank whose rendezvous rank 0 serves, as with other launchers: each start needs a separate one.
fn rank_environment(mut environment: Environment) -> Environment {
    for of_launcher in ["RYZ_RENDEZVOUS", "RYZ_SECRET_FD", "RYZ_SECRET_FILE"] {
        environment.remove(of_launcher);
    }
    environment
}
