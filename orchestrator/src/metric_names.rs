//! The metrics of this crate, in one table; those of the groups are in [`ryzanstein_process_group::metric_names`].

pub use ryzanstein_process_group::metric_names::{Kind, Metric};

/// This process.
pub const INFO: Metric = Metric {
    name: "ryz_info",
    kind: Kind::Gauge,
    labels: &["rank", "job_name", "host", "version"],
    meaning: "Always 1; its labels say what this rank is",
};
/// Restarts of the job.
pub const RESTARTS: Metric = Metric {
    name: "ryz_restarts_total",
    kind: Kind::Counter,
    labels: &[],
    meaning: "Restarts of the job by this launcher",
};
/// Heartbeats to the launcher.
pub const HEARTBEATS: Metric = Metric {
    name: "ryz_heartbeats_total",
    kind: Kind::Counter,
    labels: &["outcome"],
    meaning: "Heartbeats of this rank to the launcher; the outcome is `sent` or `failed`",
};
/// Resident memory of the process.
pub const RESIDENT_BYTES: Metric = gauge("ryz_resident_bytes", "Resident memory of the process");
/// GPU memory that this rank uses.
pub const GPU_USED_BYTES: Metric = gauge("ryz_gpu_used_bytes", "GPU memory that this rank uses");
/// GPU memory that this rank has allocated, including memory that pools keep for later.
pub const GPU_RESERVED_BYTES: Metric = gauge(
    "ryz_gpu_reserved_bytes",
    "GPU memory that this rank has allocated, what pools keep for later included",
);
/// GPU memory that this rank may allocate.
pub const GPU_LIMIT_BYTES: Metric = gauge("ryz_gpu_limit_bytes", "GPU memory that this rank may allocate");
/// Share of the reserved GPU memory that is not used, from 0 to 1.
pub const GPU_FRAGMENTATION: Metric =
    gauge("ryz_gpu_fragmentation_ratio", "Share of the reserved GPU memory that is not used, from 0 to 1");
/// 1 once the rank's GPU is lost, otherwise 0.
pub const GPU_LOST: Metric = gauge("ryz_gpu_lost", "1 once the rank's GPU is lost, otherwise 0");
/// Share of time in which a kernel ran on the rank's GPU, from 0 to 1.
pub const GPU_UTILIZATION: Metric =
    gauge("ryz_gpu_utilization_ratio", "Share of time in which a kernel ran on the rank's GPU, from 0 to 1");
/// Temperature of the rank's GPU.
pub const GPU_TEMPERATURE: Metric = gauge("ryz_gpu_temperature_celsius", "Temperature of the rank's GPU");
/// Memory of the rank's GPU that is used by any process.
pub const GPU_DEVICE_USED_BYTES: Metric =
    gauge("ryz_gpu_device_used_bytes", "Memory of the rank's GPU that anybody uses");
/// All memory of the rank's GPU.
pub const GPU_DEVICE_BYTES: Metric = gauge("ryz_gpu_device_bytes", "All memory of the rank's GPU");
/// 1 while something keeps the clocks of the rank's GPU down, otherwise 0.
pub const GPU_THROTTLED: Metric =
    gauge("ryz_gpu_throttled", "1 while something keeps the clocks of the rank's GPU down, otherwise 0");
/// Errors that ECC corrected, since the driver was loaded.
pub const GPU_ECC_CORRECTED: Metric =
    gauge("ryz_gpu_ecc_corrected", "Errors that ECC corrected, since the driver was loaded");
/// Errors that ECC could not correct, since the driver was loaded.
pub const GPU_ECC_UNCORRECTED: Metric =
    gauge("ryz_gpu_ecc_uncorrected", "Errors that ECC could not correct, since the driver was loaded");

/// The metrics that exist only on a rank with a GPU.
pub const OF_GPUS: &[Metric] = &[
    GPU_USED_BYTES,
    GPU_RESERVED_BYTES,
    GPU_LIMIT_BYTES,
    GPU_FRAGMENTATION,
    GPU_LOST,
    GPU_UTILIZATION,
    GPU_TEMPERATURE,
    GPU_DEVICE_USED_BYTES,
    GPU_DEVICE_BYTES,
    GPU_THROTTLED,
    GPU_ECC_CORRECTED,
    GPU_ECC_UNCORRECTED,
];

const fn gauge(name: &'static str, meaning: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, labels: &[], meaning }
}

/// Every metric of this crate that needs no GPU.
pub const OWN: &[Metric] = &[INFO, RESTARTS, HEARTBEATS, RESIDENT_BYTES];

/// Returns every metric of this crate and of the groups.
pub fn all() -> impl Iterator<Item = &'static Metric> {
    OWN.iter().chain(OF_GPUS).chain(ryzanstein_process_group::metric_names::ALL)
}

/// Describes each metric to the installed recorder.
pub fn describe() {
    all().for_each(Metric::describe);
}
