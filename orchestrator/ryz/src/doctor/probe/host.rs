use std::path::PathBuf;

use rustix::process::{Resource, getrlimit};
use ryzanstein_config::Config;
use ryzanstein_process_group::units;
use ryzanstein_tensor_parallel::compute::instruction_set;

use crate::doctor::facts::{Host, TemporaryFolder};
use ryzanstein_benches::cgroup::{self, read};
use ryzanstein_orchestrator::rendezvous::Environment;

/// Returns the load average of the last minute.
pub(crate) fn load() -> Option<f64> {
    read("/proc/loadavg")?.split_ascii_whitespace().next()?.parse().ok()
}

/// Returns the number of CPUs of this machine, of which this process may use fewer.
pub(crate) fn processors() -> usize {
    let stat = read("/proc/stat").unwrap_or_default();
    let is_one = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    stat.lines().filter(is_one).count().max(1)
}

pub(super) fn probe(config: &Config, environment: &Environment) -> Host {
    let meminfo = read("/proc/meminfo").unwrap_or_default();
    let (processor_quota, memory_limit) = cgroup::limits();
    let files = getrlimit(Resource::Nofile);
    Host {
        system: system(),
        processors: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        instruction_sets: instruction_set::supported(),
        asked_instruction_set: config.model.instruction_set,
        processors_online: processors(),
        load: load(),
        processor_quota,
        memory: meminfo_bytes(&meminfo, "MemTotal").unwrap_or(0),
        memory_available: meminfo_bytes(&meminfo, "MemAvailable").unwrap_or(0),
        memory_limit,
        shared_memory: rustix::fs::statvfs("/dev/shm")
            .ok()
            .map(|fs| (fs.f_blocks * fs.f_frsize, fs.f_bavail * fs.f_frsize)),
        locked_memory: getrlimit(Resource::Memlock).current,
        open_files: (files.current, files.maximum),
        temporary: temporary(environment),
    }
}

/// Returns the operating system, the kernel and the architecture.
fn system() -> String {
    let uname = rustix::system::uname();
    let distribution = read("/etc/os-release").and_then(|text| pretty_name(&text));
    [
        distribution.unwrap_or_else(|| uname.sysname().to_string_lossy().into_owned()),
        format!("kernel {}", uname.release().to_string_lossy()),
        uname.machine().to_string_lossy().into_owned(),
    ]
    .join(", ")
}

/// Describes the system, its processors and its memory, in one line.
pub(in crate::doctor) fn describe() -> String {
    // Those of the machine: a rank may be bound to some of them.
    let processors = processors();
    let memory = meminfo_bytes(&read("/proc/meminfo").unwrap_or_default(), "MemTotal").unwrap_or(0);
    format!(
        "{}; {}, {} of memory",
        system(),
        ryzanstein_orchestrator::plural(processors, "CPU"),
        units::bytes(memory as f64)
    )
}

fn pretty_name(os_release: &str) -> Option<String> {
    let line = os_release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(line.trim_matches('"').to_owned())
}

fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// Returns the folder in which rank 0 leaves the job's secret under another launcher, and whether files can be created there.
fn temporary(environment: &Environment) -> TemporaryFolder {
    let set = |name: &str| environment.get(name).filter(|folder| !folder.is_empty());
    let folder =
        set("XDG_RUNTIME_DIR").or_else(|| set("TMPDIR")).map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    let file = folder.join(format!("ryzanstein-probe-{}", std::process::id()));
    let writable = std::fs::write(&file, b"probe").map_err(|error| error.to_string());
    let _ = std::fs::remove_file(&file);
    TemporaryFolder { path: folder, writable }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_and_the_distribution_are_read() {
        assert_eq!(meminfo_bytes("MemTotal:       2048 kB\nMemFree: 1 kB\n", "MemTotal"), Some(2 << 20));
        assert_eq!(meminfo_bytes("MemTotal:       2048 kB\n", "Mem"), None);
        assert_eq!(pretty_name("NAME=x\nPRETTY_NAME=\"Some Linux 1\"\n"), Some("Some Linux 1".into()));
    }
}
