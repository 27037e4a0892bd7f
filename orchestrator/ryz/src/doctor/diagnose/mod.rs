//! Turns facts into findings. *Pure*.

mod environment;
mod fabric;
mod gpu;
mod host;
mod libraries;
mod nccl;
mod network;
mod trials;

pub(crate) use gpu::tensor_parallel;
pub(crate) use host::busy;

use super::facts::Facts;
use super::finding::Finding;

/// Returns all findings from these facts, area by area.
pub fn diagnose(facts: &Facts) -> Vec<Finding> {
    let mut findings = host::diagnose(&facts.host);
    let gpus = facts.gpu.usable().gpus.len();
    findings.extend(network::diagnose(&facts.network, gpus));
    findings.extend(fabric::diagnose(&facts.network.infiniband, &facts.fabric));
    findings.extend(gpu::diagnose(&facts.gpu, facts.backend));
    findings.extend(libraries::diagnose(&facts.libraries, gpus));
    findings.extend(nccl::diagnose(&facts.nccl, &facts.network.interfaces));
    findings.extend(environment::diagnose(&facts.variables));
    findings.extend(trials::diagnose(&facts.trials, gpus));
    findings
}

/// Formats bytes in powers of 1024.
fn memory(bytes: u64) -> String {
    let bytes = bytes as f64;
    for (unit, size) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        let size = f64::from(size).exp2();
        if bytes >= size {
            let value = bytes / size;
            return if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests;
