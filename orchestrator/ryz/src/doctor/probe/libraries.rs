use ryzanstein_config::Config;
use ryzanstein_process_group::device::{Found, Libraries, LibrarySearch, Missing};

use crate::doctor::facts::Library;
use ryzanstein_orchestrator::rendezvous::Environment;

pub(super) fn probe(config: &Config, environment: &Environment) -> Vec<Library> {
    let search = LibrarySearch::from_variables(|name| environment.get(name).cloned());
    let found = Libraries::find(&config.device, &search);
    vec![
        library("cuda_driver", "everything on a GPU", &found.driver),
        library("nccl", "collectives between GPUs", &found.nccl),
        library("nvrtc", "our own kernels, which are compiled on the machine they run on", &found.nvrtc),
        library("cublaslt", "matrix products on a GPU", &found.cublaslt),
    ]
}

fn library<T>(name: &'static str, needed_for: &'static str, found: &Result<Found<T>, Missing>) -> Library {
    let found = match found {
        Ok(found) => Ok(format!("{}, {}, found by {}", found.version, found.path.display(), found.origin)),
        Err(missing) => Err(missing.to_string()),
    };
    Library { name, needed_for, found }
}
