use ryzanstein_orchestrator::plural;

use super::memory;
use crate::doctor::facts::{Host, TemporaryFolder};
use crate::doctor::finding::{Finding, Status};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Size of `/dev/shm` that container engines set by default.
const CONTAINER_SHM: u64 = 64 * MIB;

pub(super) fn diagnose(host: &Host) -> Vec<Finding> {
    vec![
        Finding::new("host", "system", Status::Ok, &host.system),
        processors(host),
        load(host),
        instruction_sets(host),
        available(host),
        shared_memory(host),
        locked_memory(host),
        open_files(host),
        temporary(host),
    ]
}

fn new(name: &'static str, status: Status, seen: impl Into<String>) -> Finding {
    Finding::new("host", name, status, seen)
}

fn processors(host: &Host) -> Finding {
    let count = host.processors;
    let seen = match host.processor_quota {
        Some(quota) => format!("{count}, limited to {quota:.1} by cgroup"),
        None => format!("{count}"),
    };
    if host.processor_quota.is_some_and(|quota| quota < 1.0) {
        return new("processors", Status::Warning, seen)
            .because("a rank polls while it waits for a peer; below one CPU the kernel suspends it meanwhile")
            .remedy("raise the container's CPU limit to at least one CPU per rank");
    }
    new("processors", Status::Ok, seen)
}

fn load(host: &Host) -> Finding {
    match busy(host.load, host.processors_online) {
        Some(told) => new("load", Status::Info, told),
        None => new("load", Status::Ok, host.load.map_or("unknown".into(), |load| format!("{load:.1}"))),
    }
}

/// Returns a sentence about a machine that is busy; `None` if it is not.
pub(crate) fn busy(load: Option<f64>, processors: usize) -> Option<String> {
    let load = load.filter(|load| *load >= 0.5 * processors as f64)?;
    let processors = plural(processors, "CPU");
    Some(format!(
        "this machine is busy: load {load:.1} on {processors}; measured times will be longer and spread more"
    ))
}

fn instruction_sets(host: &Host) -> Finding {
    let names = |but| {
        let others = host.instruction_sets.iter().filter(|set| Some(**set) != but);
        others.map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    let (used, origin) = match host.asked_instruction_set {
        Some(set) if !host.instruction_sets.contains(&set) => {
            return new("instruction_set", Status::Broken, format!("model.instruction_set is {set}"))
                .because(
                    "this processor lacks it, or the system does not allow it; ranks on CPUs do not start",
                )
                .remedy(format!("unset it, or set one of {}", names(None)));
        }
        Some(set) => (Some(set), ", as model.instruction_set"),
        None => (host.instruction_sets.first().copied(), ""),
    };
    let others = names(used);
    let also = if others.is_empty() { String::new() } else { format!("; also {others}") };
    let used = used.map_or(String::new(), |set| set.to_string());
    new("instruction_set", Status::Ok, format!("{used}{origin}{also}"))
}

fn available(host: &Host) -> Finding {
    let limit = host.memory_limit.filter(|limit| *limit < host.memory);
    let seen = format!("{} of {} available", memory(host.memory_available), memory(host.memory))
        + &limit.map_or(String::new(), |limit| format!(", limited to {} by cgroup", memory(limit)));
    let room = host.memory_available.min(limit.unwrap_or(u64::MAX));
    if room < GIB {
        return new("memory", Status::Warning, seen)
            .because("a rank needs a few hundred megabytes, plus its shard of the model on the CPU")
            .remedy("end other processes, or raise the container's memory limit");
    }
    new("memory", Status::Ok, seen)
}

fn shared_memory(host: &Host) -> Finding {
    let Some((size, free)) = host.shared_memory else {
        return new("shared_memory", Status::Warning, "/dev/shm is missing")
            .because("NCCL uses it for data between GPUs without peer access")
            .remedy("mount one: mount -t tmpfs -o size=8G tmpfs /dev/shm");
    };
    let seen = format!("{} free of {} at /dev/shm", memory(free), memory(size));
    if size <= CONTAINER_SHM || free < CONTAINER_SHM / 2 {
        return new("shared_memory", Status::Warning, seen)
            .because("NCCL uses it for data between GPUs without peer access, and dies with a bus error when it is full")
            .remedy("start the container with --shm-size=8g or --ipc=host; in Kubernetes, mount an emptyDir of medium Memory");
    }
    new("shared_memory", Status::Ok, seen)
}

fn locked_memory(host: &Host) -> Finding {
    match host.locked_memory {
        None => new("locked_memory", Status::Ok, "no limit"),
        Some(limit) => new("locked_memory", Status::Info, format!("limited to {}", memory(limit)))
            .because("InfiniBand registers its buffers as locked memory; TCP and NVLink need none")
            .remedy("for InfiniBand: ulimit -l unlimited, or --ulimit memlock=-1 for a container"),
    }
}

fn open_files(host: &Host) -> Finding {
    let (now, most) = host.open_files;
    let text = |limit: Option<u64>| limit.map_or("no limit".into(), |limit| limit.to_string());
    let seen = format!("{}, hard limit {}", text(now), text(most));
    if most.is_some_and(|most| most < 1024) {
        return new("open_files", Status::Warning, seen)
            .because("the launcher keeps three descriptors per rank, and every rank a link to every other")
            .remedy("raise the hard limit: ulimit -Hn 65536, or --ulimit nofile=65536 for a container");
    }
    new("open_files", Status::Ok, seen)
}

fn temporary(host: &Host) -> Finding {
    let TemporaryFolder { path: folder, writable } = &host.temporary;
    match writable {
        Ok(()) => new("temporary_folder", Status::Ok, format!("{} is writable", folder.display())),
        Err(why) => new("temporary_folder", Status::Warning, format!("{} is not writable: {why}", folder.display()))
            .because("under another launcher, rank 0 leaves the job's secret in a file there for the ranks of its host")
            .remedy("set XDG_RUNTIME_DIR or TMPDIR to a writable folder of your own"),
    }
}
