//! Checks whether a rank can use the CPU collectives, and makes the groups that use them.

use ryzanstein_config::Config;

use super::spin::SpinPolicy;
use super::{CpuGroup, Settings, decline};
use crate::error::{Error, Result};
use crate::factory::{AnyBackend, BackendFactory, GroupSpec, ProbeContext};
use crate::link::mesh::{Mesh, Unconnected};
use crate::membership::capability::Capability;
use crate::schedule::{Algorithm, Hosts};
use crate::types::backend_kind::BackendKind;

/// Makes the groups whose ranks have links to each other.
pub(crate) struct Factory;

impl BackendFactory for Factory {
    fn kind(&self) -> BackendKind {
        BackendKind::Tcp
    }

    fn probe(&mut self, context: &ProbeContext<'_>) -> Capability {
        match &context.listens {
            Ok(()) => Capability::usable(BackendKind::Tcp),
            Err(error) => {
                Capability::unusable(BackendKind::Tcp, "this rank cannot listen", error.to_string())
            }
        }
    }

    fn connect(&mut self, group: &GroupSpec<'_>) -> Result<AnyBackend> {
        let tcp = &group.config.process_group.tcp;
        let settings = Settings {
            demand: demanded(group.config)?,
            tuned: group.tuned.to_vec(),
            spin: SpinPolicy { limit: tcp.spin, yields: group.cpus_are_short },
            shared_memory: tcp.shared_memory,
            liveness: group.mesh.map(Mesh::liveness),
        };
        let hosts = Hosts::of(group.members.iter().map(|member| &member.host));
        // The group of all ranks must be able to use the algorithm. A smaller group that cannot use it takes the cheapest.
        let is_whole = group.name == "world" && group.members.len() > 1;
        if is_whole
            && settings.demand == Some(Algorithm::Hierarchical)
            && let Some(why) = hosts.why_one_level()
        {
            return Err(Error::Configuration(format!(
                "process_group.tcp.algorithm is `hierarchical`, which needs several hosts, one of them with several ranks, and \
                 {why}; set another algorithm, or `auto`"
            )));
        }
        let me = group.members[group.rank.index()].rank;
        let connections = group.connect().map_err(|unconnected| {
            let Unconnected { error, connections } = *unconnected;
            // The ranks that were reached wait for this rank, and would name it instead of the missing rank.
            decline(me, &group.members, connections, &error);
            error
        })?;
        let mut this = CpuGroup::new(group.name, group.rank, &group.members, connections, settings);
        this.negotiate(group.deadline)?;
        Ok(AnyBackend::Cpu(Box::new(this)))
    }
}

/// Returns the algorithm that the setting demands; `None` for `auto`.
///
/// # Errors
/// The setting names no algorithm.
pub(crate) fn demanded(config: &Config) -> Result<Option<Algorithm>> {
    let name = config.process_group.tcp.algorithm.trim();
    if name == "auto" {
        return Ok(None);
    }
    let algorithm = Algorithm::named(name).ok_or_else(|| {
        let key = "process_group.tcp.algorithm";
        let source = config.source_of(key).map(|source| format!(" ({source})")).unwrap_or_default();
        let names = Algorithm::ALL.map(Algorithm::name).join(", ");
        Error::Configuration(format!("{key} is `{name}`{source}: expected one of auto, {names}"))
    })?;
    Ok(Some(algorithm))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_algorithm_can_be_demanded_and_auto_demands_none() {
        let mut config = Config::default();
        assert_eq!(demanded(&config).unwrap(), None);
        for algorithm in Algorithm::ALL {
            config.process_group.tcp.algorithm = algorithm.name().into();
            assert_eq!(demanded(&config).unwrap(), Some(algorithm));
        }
        config.process_group.tcp.algorithm = "rinng".into();
        let error = demanded(&config).unwrap_err().to_string();
        assert!(error.contains("`rinng` (code)") && error.contains("auto, ring"), "{error}");
    }
}
