use ryzanstein_config::BackendChoice;
use ryzanstein_process_group::nvml::{Gpu, Pair, PairPath, PeerAccess};

use super::memory;
use crate::doctor::facts::{DriverFacts, GpuFacts};
use crate::doctor::finding::{Finding, Status};

/// A GPU within this many degrees of its slowdown temperature counts as hot.
const HOT: u32 = 5;
/// A GPU with more than this share of its memory in use counts as busy.
const BUSY: f64 = 0.1;

fn new(name: &'static str, status: Status, seen: impl Into<String>) -> Finding {
    Finding::new("gpu", name, status, seen)
}

pub(super) fn diagnose(side: &GpuFacts, backend: BackendChoice) -> Vec<Finding> {
    let mut findings = Vec::new();
    let none = DriverFacts::default();
    let driver = match &side.driver {
        Ok(driver) => {
            let cuda = driver.cuda.map_or(String::new(), |(major, minor)| format!(", CUDA {major}.{minor}"));
            findings.push(new("driver", Status::Ok, format!("{}{cuda}", driver.version)));
            driver
        }
        Err(why) => {
            findings.push(no_driver(side, why));
            &none
        }
    };
    let usable = side.usable();
    if usable.gpus.is_empty() {
        findings.push(no_gpu(side, backend));
    }
    if !driver.gpus.is_empty() {
        findings.extend(visible(side, &usable));
        findings.extend(driver.gpus.iter().map(|gpu| one(gpu, side.is_shown(gpu))));
    }
    if usable.gpus.is_empty() {
        findings.push(new("tensor_parallel", Status::Info, "on the CPU: at most one rank per CPU"));
        return findings;
    }
    findings.extend(nvlinks(&usable));
    findings.extend(peer_access(&usable));
    findings.push(tensor_parallel(&usable));
    findings
}

fn no_driver(side: &GpuFacts, why: &str) -> Finding {
    if let Some(module) = &side.module {
        return new("driver", Status::Broken, format!("the kernel has loaded driver {module}, but it does not respond"))
            .because(why)
            .remedy("in a container: start it with --gpus all, or mount the host's libnvidia-ml.so.1 and libcuda.so.1; \
                      where a GPU was lost (`Xid` in dmesg), restart the machine");
    }
    if side.on_bus > 0 {
        return new(
            "driver",
            Status::Broken,
            format!("{} NVIDIA GPUs on the PCI bus, but no driver", side.on_bus),
        )
        .because(why)
        .remedy("install NVIDIA's driver (525 or newer), or, in a container, start it with --gpus all");
    }
    new("driver", Status::Info, "no NVIDIA driver").because(why)
}

fn no_gpu(side: &GpuFacts, backend: BackendChoice) -> Finding {
    let cause = match &side.driver {
        Ok(driver) if driver.gpus.is_empty() => "the driver shows no GPU to this process",
        Ok(_) => "there are GPUs, but CUDA shows this process none of them",
        Err(_) => "no NVIDIA GPU is on the PCI bus, and no driver is loaded",
    };
    let is_hidden = side.driver.as_ref().is_ok_and(|driver| !driver.gpus.is_empty());
    let remedy = if is_hidden {
        "to use GPUs, make them visible to CUDA: see visible_devices"
    } else {
        "to use GPUs, run where there are some: a machine with NVIDIA's driver, a container started with --gpus all, a \
         Slurm job with --gres=gpu:N, a Kubernetes pod with a limit of nvidia.com/gpu"
    };
    if backend == BackendChoice::Nccl {
        return new("gpus", Status::Broken, "none, but process_group.backend is nccl")
            .because(cause)
            .remedy(format!("set process_group.backend to auto or tcp; or, {remedy}"));
    }
    new("gpus", Status::Info, "none: everything runs on the CPU").because(cause).remedy(remedy)
}

/// Returns the GPUs that are hidden from a job, and the cause.
fn visible(side: &GpuFacts, usable: &DriverFacts) -> Option<Finding> {
    let new = |status, seen: String| new("visible_devices", status, seen);
    let list = side.visible.as_ref().map(|list| format!("CUDA_VISIBLE_DEVICES is `{list}`"));
    if let Err(why) = &side.shown {
        let list = list.map_or(String::new(), |list| format!("{list}; "));
        let seen = format!("{list}CUDA does not report which GPUs are visible, so all count here");
        return Some(new(Status::Info, seen).because(why.clone()));
    }
    let numbers: Vec<String> = usable.gpus.iter().map(|gpu| gpu.index.to_string()).collect();
    let (several, numbers) = (if numbers.len() == 1 { "" } else { "s" }, numbers.join(", "));
    match list {
        Some(list) if usable.gpus.is_empty() => {
            let seen = format!("{list}, which hides every GPU");
            Some(new(Status::Warning, seen).remedy("unset CUDA_VISIBLE_DEVICES"))
        }
        None if usable.gpus.is_empty() => Some(
            new(Status::Warning, "CUDA shows no GPU to this process".into())
                .because("NVIDIA's management library lists some that CUDA hides")
                .remedy("give the container or the cgroup access to the GPUs' devices: /dev/nvidia*"),
        ),
        Some(list) => Some(new(Status::Info, format!("{list}: ranks use GPU{several} {numbers} only"))),
        None => (side.driver.as_ref().is_ok_and(|driver| driver.gpus.len() > usable.gpus.len()))
            .then(|| new(Status::Info, format!("CUDA shows GPU{several} {numbers} only"))),
    }
}

/// Returns the finding for one GPU. Faults of a GPU that no job may use are only informative.
fn one(gpu: &Gpu, is_shown: bool) -> Finding {
    let mut seen =
        format!("{}, {} of {} in use", gpu.name, memory(gpu.memory_used_bytes), memory(gpu.memory_bytes));
    if let Some(temperature) = gpu.temperature {
        seen = format!("{seen}, {temperature} °C");
    }
    seen += match gpu.ecc {
        Some(true) => ", ECC on",
        Some(false) => ", ECC off",
        None => "",
    };
    let finding = |status| new("gpu", status, seen.clone()).of(gpu.index.to_string());
    let worst = problems(gpu).into_iter().max_by_key(|(status, ..)| *status);
    match worst {
        _ if !is_shown => {
            let hidden = "CUDA does not show it, so no rank uses it";
            finding(Status::Info)
                .because(worst.map_or(hidden.into(), |(_, cause, _)| format!("{hidden}; {cause}")))
        }
        Some((status, cause, remedy)) => finding(status).because(cause).remedy(remedy),
        None => finding(Status::Ok),
    }
}

/// Returns all faults of a GPU; of equally severe ones the more important comes later.
fn problems(gpu: &Gpu) -> Vec<(Status, String, &'static str)> {
    let mut all = Vec::new();
    if let Some(reasons) = Some(&gpu.throttled_by).filter(|reasons| !reasons.is_empty()) {
        let power_only = reasons.iter().all(|reason| reason.contains("power limit"));
        let status = if power_only { Status::Info } else { Status::Warning };
        all.push((
            status,
            format!("its clocks are throttled by {}", reasons.join(", ")),
            "check cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        ));
    }
    if gpu.memory_bytes > 0 && gpu.memory_used_bytes as f64 > BUSY * gpu.memory_bytes as f64 {
        all.push((
            Status::Warning,
            format!("{} of its memory is in use already", memory(gpu.memory_used_bytes)),
            "nvidia-smi lists the processes; end them, or choose other GPUs with CUDA_VISIBLE_DEVICES",
        ));
    }
    if let (Some(temperature), Some(limit)) = (gpu.temperature, gpu.slowdown_temperature)
        && temperature + HOT >= limit
    {
        all.push((
            Status::Warning,
            format!("it is close to {limit} °C, where it throttles itself"),
            "check its cooling: nvidia-smi -q -d TEMPERATURE",
        ));
    }
    if gpu.mig == Some(true) {
        all.push((
            Status::Warning,
            "MIG splits it into instances, which cannot access each other's memory or another GPU's".into(),
            "use one rank, or have the administrator turn MIG off: nvidia-smi -mig 0",
        ));
    }
    if gpu.nvlinks_down > 0 && gpu.nvlinks > 0 {
        all.push((
            Status::Warning,
            format!("{} of its {} NVLinks are down", gpu.nvlinks_down, gpu.nvlinks + gpu.nvlinks_down),
            "check them with nvidia-smi nvlink -s; on machines with NVSwitch, check nvidia-fabricmanager",
        ));
    }
    if let Some(errors) = gpu.ecc_uncorrected.filter(|errors| *errors > 0) {
        all.push((
            Status::Broken,
            format!("ECC found {errors} uncorrectable errors, so results may be wrong"),
            "restart the machine; replace the GPU if it happens again: nvidia-smi -q -d ECC,ROW_REMAPPER",
        ));
    }
    if gpu.prohibited {
        all.push((
            Status::Broken,
            "its compute mode prohibits contexts".into(),
            "have the administrator allow them: nvidia-smi -c DEFAULT",
        ));
    }
    all
}

fn nvlinks(driver: &DriverFacts) -> Option<Finding> {
    let with: Vec<&Gpu> = driver.gpus.iter().filter(|gpu| gpu.nvlinks > 0).collect();
    if driver.gpus.len() < 2 {
        return None;
    }
    let Some(first) = with.first() else {
        return Some(
            new("nvlink", Status::Info, "no GPU has an active NVLink")
                .because("data between GPUs goes over PCIe"),
        );
    };
    let each = first.nvlink_gbs.map_or(String::new(), |gbs| {
        format!(" of {gbs:.1} GB/s, {:.0} GB/s each way in all", gbs * f64::from(first.nvlinks))
    });
    let seen = format!("{} links per GPU{each}", first.nvlinks);
    let uneven = with.len() != driver.gpus.len() || with.iter().any(|gpu| gpu.nvlinks != first.nvlinks);
    Some(if uneven {
        new("nvlink", Status::Warning, seen)
            .because("not every GPU has as many, and the slowest limits all")
            .remedy("check them: nvidia-smi nvlink -s")
    } else {
        new("nvlink", Status::Ok, seen)
    })
}

fn peer_access(driver: &DriverFacts) -> Option<Finding> {
    if driver.gpus.len() < 2 {
        return None;
    }
    let without: Vec<(&Pair, &str)> = driver
        .pairs
        .iter()
        .filter_map(|pair| match &pair.peer_access {
            PeerAccess::Yes => None,
            PeerAccess::No(why) => Some((pair, why.as_str())),
        })
        .collect();
    let Some((_, why)) = without.first() else {
        return Some(new("peer_access", Status::Ok, "every GPU can access every other's memory"));
    };
    let pairs: Vec<String> = without.iter().map(|(pair, _)| format!("{}-{}", pair.a, pair.b)).collect();
    Some(
        new("peer_access", Status::Warning, format!("not between GPUs {}", pairs.join(", ")))
            .because(format!("{why}; data between them passes through host memory"))
            .remedy(
                "turn off ACS and IOMMU translation for the GPUs, or place ranks on GPUs with peer access",
            ),
    )
}

/// Returns the number of ranks that should share a layer, from the links between the GPUs, of which there is at least one.
pub(crate) fn tensor_parallel(driver: &DriverFacts) -> Finding {
    let gpus = driver.gpus.len();
    let power_of_two = |most: usize| 1 << most.max(1).ilog2();
    let ok = |ranks: usize, why: &str| new("tensor_parallel", Status::Ok, format!("up to {ranks}: {why}"));
    if gpus == 1 {
        return ok(1, "there is one GPU");
    }
    if driver.is_all_nvlink() {
        return ok(power_of_two(gpus.min(8)), "NVLink connects every two GPUs");
    }
    let largest = largest_nvlink_domain(driver);
    if largest > 1 {
        return ok(
            power_of_two(largest.min(8)),
            &format!(
                "NVLink connects at most {largest} GPUs with each other; for more ranks, use pipeline stages or replicas"
            ),
        );
    }
    if driver.pairs.iter().any(|pair| pair.peer_access == PeerAccess::Yes) {
        return ok(
            2,
            "the GPUs are connected by PCIe, and two all-reduces per layer cost more than further GPUs save",
        );
    }
    new("tensor_parallel", Status::Info, "1 is likely best: the GPUs have no peer access")
        .because("two all-reduces per layer would pass through host memory")
        .remedy("use pipeline stages or replicas of the model instead; measure with ryz bench")
}

/// Returns the size of the largest set of GPUs in which every two are connected by NVLink.
fn largest_nvlink_domain(driver: &DriverFacts) -> usize {
    let connected = |a: u32, b: u32| {
        driver
            .pairs
            .iter()
            .any(|pair| (pair.a, pair.b) == (a.min(b), a.max(b)) && matches!(pair.path, PairPath::Nvlink(_)))
    };
    let grow = |start: &Gpu| {
        let mut domain = vec![start.index];
        for gpu in &driver.gpus {
            if domain.iter().all(|member| *member != gpu.index && connected(*member, gpu.index)) {
                domain.push(gpu.index);
            }
        }
        domain.len()
    };
    driver.gpus.iter().map(grow).max().unwrap_or(0)
}
