//! Thin probes: each reads one corner of the machine into [`Facts`](super::Facts), and concludes nothing.

mod cgroup;
mod gpu;
mod host;
mod libraries;
mod network;
mod trial;

use std::path::Path;

use ryzanstein_config::{Config, nccl};

pub use host::read_memory_of;
pub use trial::try_all_reduce;

use super::Helper;
use super::facts::Facts;
use crate::nccl_settings;
use crate::rendezvous::Environment;

pub(super) fn facts(config: &Config, environment: &Environment, helper: &Helper) -> Facts {
    let gpu = gpu::probe(environment);
    let gpus = gpu.driver.as_ref().map_or(0, |driver| driver.gpus.len());
    Facts {
        host: host::probe(environment, helper),
        network: network::probe(),
        libraries: libraries::probe(config, environment),
        nccl: nccl::plan(config, &nccl_settings::own(environment)),
        backend: config.process_group.backend,
        trials: trial::probe(config, environment, helper, visible(environment, gpus)),
        gpu,
    }
}

/// How many of so many GPUs `CUDA_VISIBLE_DEVICES` leaves.
fn visible(environment: &Environment, gpus: usize) -> usize {
    let Some(list) = environment.get("CUDA_VISIBLE_DEVICES") else { return gpus };
    // CUDA stops at the first entry that is none.
    let listed =
        list.split(',').map(str::trim).take_while(|entry| !entry.is_empty() && !entry.starts_with('-'));
    listed.count().min(gpus)
}

/// The text of a file of `/proc` or `/sys`, without the space around it; none if it cannot be read.
fn read(path: impl AsRef<Path>) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// The names in a folder, in order; none if it cannot be read.
fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_visible_gpus_are_counted_as_cuda_does() {
        let with = |list: &str| Environment::from([("CUDA_VISIBLE_DEVICES".to_owned(), list.to_owned())]);
        assert_eq!(visible(&Environment::new(), 4), 4);
        for (list, count) in
            [("0,1", 2), ("", 0), ("-1", 0), ("2,-1,3", 1), ("0,1,2,3,4,5", 4), ("GPU-a, GPU-b", 2)]
        {
            assert_eq!(visible(&with(list), 4), count, "{list}");
        }
    }
}
