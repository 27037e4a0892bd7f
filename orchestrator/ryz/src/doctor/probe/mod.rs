//! Thin probes: each reads one part of the machine into [`Facts`](super::Facts) and concludes nothing.

mod fabric;
mod gpu;
mod host;
mod libraries;
mod network;
mod pci;
mod process;
mod trial;

use std::path::Path;

use ryzanstein_config::{Config, nccl};

pub use gpu::visible_gpus;
pub(super) use host::{load, processors};
pub use trial::try_all_reduce;

use super::ProbeCommand;
use super::facts::{Facts, Hardware};
use ryzanstein_orchestrator::nccl_settings;
use ryzanstein_orchestrator::plural;
use ryzanstein_orchestrator::rendezvous::Environment;

pub(super) fn facts(config: &Config, environment: &Environment, probe: &ProbeCommand) -> Facts {
    let gpu = gpu::probe(environment, probe);
    Facts {
        host: host::probe(config, environment),
        network: network::probe(),
        fabric: fabric::probe(environment),
        libraries: libraries::probe(config, environment),
        nccl: nccl::plan(config, &nccl_settings::user_variables(environment)),
        variables: environment
            .iter()
            .filter(|(name, _)| name.starts_with("CUDA_") || name.starts_with("UCX_"))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
        backend: config.process_group.backend,
        trials: trial::probe(config, environment, probe, gpu.usable().gpus.len()),
        gpu,
    }
}

/// Returns the links between the parts of this machine. Changes nothing and starts no process.
pub fn hardware() -> Hardware {
    Hardware {
        host: ryzanstein_orchestrator::host_name(),
        driver: gpu::driver().map_err(|error| error.to_string()),
        network: network::probe(),
        numa_nodes: pci::numa_nodes(),
    }
}

/// Describes this machine in one line: its system, processors, memory and GPUs. Changes nothing and starts no process.
pub fn machine() -> String {
    let gpus = gpu::driver().unwrap_or_default().gpus;
    let mut kinds: Vec<&str> = gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    kinds.dedup();
    let gpus = if gpus.is_empty() {
        String::new()
    } else {
        format!("; {}: {}", plural(gpus.len(), "GPU"), kinds.join(", "))
    };
    format!("{}{gpus}", host::describe())
}

/// Returns the names in a folder, sorted; empty if it cannot be read.
fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}
