//! Finds the measured table of paths, and shares it: rank 0 reads it, and every rank gets what rank 0 has read.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use ryzanstein_config::{ByteSize, TuningChoice, file};

use crate::device::nvml::Nvml;
use crate::error::{Error, Result};
use crate::membership::rendezvous::Membership;
use crate::membership::store::group_key;
use crate::paths::tuned::{Machine, TunedRange, TuningTable};

/// Far larger than any table, and smaller than the limit for a value of the store.
pub const LARGEST_FILE: ByteSize = ByteSize::kib(128);

/// Returns the table of this user in the user's state folder (`XDG_STATE_HOME`, or `.local/state` in `HOME`).
pub fn user_file(state: &Path) -> PathBuf {
    state.join("ryzanstein").join("paths.json")
}

/// Describes the machine of this process: all of its processors, whichever this rank may use.
pub fn machine() -> Machine {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let architecture = || rustix::system::uname().machine().to_string_lossy().into_owned();
    Machine {
        cpu: model(&info).unwrap_or_else(architecture),
        cpus: info.lines().filter(|line| line.starts_with("processor")).count().max(1),
        gpus: gpus(),
    }
}

/// Lists the GPUs of this machine, each kind once with its number, and their driver.
fn gpus() -> String {
    let Ok(nvml) = Nvml::open() else { return String::new() };
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for gpu in nvml.gpus().unwrap_or_default() {
        *kinds.entry(gpu.name).or_default() += 1;
    }
    if kinds.is_empty() {
        return String::new();
    }
    let kinds: Vec<String> = kinds.into_iter().map(|(name, count)| format!("{count} × {name}")).collect();
    format!("{}, driver {}", kinds.join(", "), nvml.driver_version())
}

/// Returns the first processor's model, if the kernel reports it.
fn model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    let (_, model) = line.split_once(':')?;
    Some(model.trim().to_owned()).filter(|model| !model.is_empty())
}

/// Returns the ranges for this job: those of rank 0's table, the same on every rank. Empty for a single rank and for several hosts,
/// for which no table is measured. All ranks call this, or none.
///
/// # Errors
/// [`Error::Configuration`] on every rank where rank 0 was told of a table that it cannot use; those of the store.
pub(crate) fn agree(
    choice: &TuningChoice,
    state: Option<&Path>,
    membership: &Membership,
    deadline: Instant,
) -> Result<Vec<TunedRange>> {
    let (roster, store) = (&membership.roster, &membership.store);
    let hosts: HashSet<&str> = roster.members.iter().map(|member| member.host.as_str()).collect();
    if roster.world_size() < 2 || hosts.len() > 1 {
        if let (TuningChoice::File(path), 0) = (choice, membership.rank.0) {
            tracing::warn!(
                "process_group.tuning names {}, but a table is for several ranks of one host; the built-in one decides",
                path.display()
            );
        }
        return Ok(Vec::new());
    }
    let key = group_key("tuning", "world", "table");
    let read: std::result::Result<Vec<TunedRange>, String> = if membership.rank.0 == 0 {
        let read = ranges(choice, state, roster.world_size());
        let bytes = rmp_serde::to_vec_named(&read)
            .map_err(|error| Error::Rendezvous(format!("the table of paths cannot be encoded: {error}")))?;
        store.set(&key, &bytes)?;
        read
    } else {
        let bytes = store.get(&key, deadline)?;
        rmp_serde::from_slice(&bytes)
            .map_err(|error| Error::Rendezvous(format!("rank 0's table of paths cannot be read: {error}")))?
    };
    read.map_err(Error::Configuration)
}

/// Returns the ranges that rank 0 finds. A table that the user named must fit; a default table that does not is ignored, with a
/// warning.
fn ranges(
    choice: &TuningChoice,
    state: Option<&Path>,
    world_size: usize,
) -> std::result::Result<Vec<TunedRange>, String> {
    let (path, is_named) = match (choice, state) {
        (TuningChoice::Off, _) | (TuningChoice::Auto, None) => return Ok(Vec::new()),
        (TuningChoice::File(path), _) => (path.clone(), true),
        (TuningChoice::Auto, Some(state)) => (user_file(state), false),
    };
    let shown = path.display();
    let text = match file::read_text(&path, LARGEST_FILE) {
        Err(error) if error.is_not_found() && !is_named => return Ok(Vec::new()),
        read => read.map_err(|error| error.to_string()),
    };
    let table =
        text.and_then(|text| TuningTable::parse(&text, &machine()).map_err(|error| error.to_string()));
    match table {
        Ok(table) => {
            let found = table.of_world(world_size);
            if found.is_empty() && is_named {
                let sizes: Vec<String> = table.world_sizes().iter().map(ToString::to_string).collect();
                tracing::warn!(
                    "process_group.tuning: {shown} has nothing for {world_size} ranks (only for: {}); the built-in table decides",
                    sizes.join(", ")
                );
            } else if !found.is_empty() {
                tracing::info!("paths as measured by ryz tune: {} ranges of {shown}", found.len());
            }
            Ok(found)
        }
        Err(why) if is_named => Err(format!("process_group.tuning: {shown}: {why}")),
        Err(why) => {
            tracing::warn!(
                "{shown} is not used, and the built-in table of paths decides: {why}. Remove the file, or set process_group.tuning \
                 to off, to be told no more"
            );
            Ok(Vec::new())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_the_processor_is_the_first_that_the_kernel_names() {
        let info = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: A CPU @ 2 GHz\nmodel name\t: Another\n";
        assert_eq!(model(info).as_deref(), Some("A CPU @ 2 GHz"));
        assert_eq!(model("processor : 0\nBogoMIPS : 50\n"), None);
    }

    #[test]
    fn a_table_that_was_named_must_fit_and_one_that_lies_there_need_not() {
        let state = tempfile::tempdir().unwrap();
        let path = user_file(state.path());
        let named = TuningChoice::File(path.clone());
        let of = |choice: &TuningChoice| ranges(choice, Some(state.path()), 2);
        assert_eq!(of(&TuningChoice::Auto), Ok(Vec::new()), "nothing is there");
        let missing = of(&named).unwrap_err();
        assert!(missing.contains("process_group.tuning") && missing.contains("paths.json"), "{missing}");

        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "{}").unwrap();
        assert_eq!(of(&TuningChoice::Auto), Ok(Vec::new()));
        let broken = of(&named).unwrap_err();
        assert!(broken.contains("no table of `ryz tune`") && broken.contains("again"), "{broken}");

        let elsewhere = Machine { cpu: "another".into(), cpus: 3, gpus: String::new() };
        std::fs::write(&path, TuningTable::new(elsewhere).json()).unwrap();
        let foreign = of(&named).unwrap_err();
        assert!(foreign.contains("measured on 3 × another"), "{foreign}");
        assert_eq!(of(&TuningChoice::Auto), Ok(Vec::new()));

        std::fs::write(&path, TuningTable::new(machine()).json()).unwrap();
        assert_eq!((of(&named), of(&TuningChoice::Off)), (Ok(Vec::new()), Ok(Vec::new())));
    }
}
