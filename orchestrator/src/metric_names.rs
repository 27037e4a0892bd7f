//! The names of all metrics of this crate, in one place.

/// Connections to the rendezvous that failed to authenticate.
pub const REFUSED_CONNECTIONS: &str = "ryz_rendezvous_refused_connections_total";
/// 1 for this process, with its rank, host and version as labels.
pub const INFO: &str = "ryz_info";
/// Heartbeats to the launcher, by outcome: `sent` or `failed`.
pub const HEARTBEATS: &str = "ryz_heartbeats_total";
/// Resident memory of the process.
pub const RESIDENT_BYTES: &str = "ryz_resident_bytes";
/// GPU memory that this rank uses.
pub const GPU_USED_BYTES: &str = "ryz_gpu_used_bytes";
/// GPU memory that this rank has allocated, what pools keep for later included.
pub const GPU_RESERVED_BYTES: &str = "ryz_gpu_reserved_bytes";
/// GPU memory that this rank may allocate.
pub const GPU_LIMIT_BYTES: &str = "ryz_gpu_limit_bytes";
/// The share of the reserved GPU memory that is not used, from 0 to 1.
pub const GPU_FRAGMENTATION: &str = "ryz_gpu_fragmentation_ratio";
/// 1 once the rank's GPU is lost, otherwise 0.
pub const GPU_LOST: &str = "ryz_gpu_lost";
/// The share of time in which a kernel ran on the rank's GPU, from 0 to 1.
pub const GPU_UTILIZATION: &str = "ryz_gpu_utilization_ratio";
/// Temperature of the rank's GPU.
pub const GPU_TEMPERATURE: &str = "ryz_gpu_temperature_celsius";
/// Memory of the rank's GPU that anybody uses.
pub const GPU_DEVICE_USED_BYTES: &str = "ryz_gpu_device_used_bytes";
/// All memory of the rank's GPU.
pub const GPU_DEVICE_BYTES: &str = "ryz_gpu_device_bytes";
/// 1 while something keeps the clocks of the rank's GPU down, otherwise 0.
pub const GPU_THROTTLED: &str = "ryz_gpu_throttled";
/// Errors of the rank's GPU that ECC corrected, since the driver was loaded.
pub const GPU_ECC_CORRECTED: &str = "ryz_gpu_ecc_corrected";
/// Errors of the rank's GPU that ECC could not correct, since the driver was loaded.
pub const GPU_ECC_UNCORRECTED: &str = "ryz_gpu_ecc_uncorrected";

/// The gauges that come with a heartbeat, with a description each.
const GAUGES: [(&str, &str); 13] = [
    (RESIDENT_BYTES, "Resident memory of the process"),
    (GPU_USED_BYTES, "GPU memory that this rank uses"),
    (GPU_RESERVED_BYTES, "GPU memory that this rank has allocated, pools included"),
    (GPU_LIMIT_BYTES, "GPU memory that this rank may allocate"),
    (GPU_FRAGMENTATION, "Share of the reserved GPU memory that is not used"),
    (GPU_LOST, "1 once the rank's GPU is lost"),
    (GPU_UTILIZATION, "Share of time in which a kernel ran on the rank's GPU"),
    (GPU_TEMPERATURE, "Temperature of the rank's GPU"),
    (GPU_DEVICE_USED_BYTES, "Memory of the rank's GPU that anybody uses"),
    (GPU_DEVICE_BYTES, "All memory of the rank's GPU"),
    (GPU_THROTTLED, "1 while something keeps the clocks of the rank's GPU down"),
    (GPU_ECC_CORRECTED, "Errors that ECC corrected, since the driver was loaded"),
    (GPU_ECC_UNCORRECTED, "Errors that ECC could not correct, since the driver was loaded"),
];

/// Describes each metric to the installed recorder.
pub fn describe() {
    metrics::describe_counter!(
        REFUSED_CONNECTIONS,
        "Connections to the rendezvous that failed to authenticate"
    );
    metrics::describe_gauge!(INFO, "1, with rank, host and version as labels");
    metrics::describe_counter!(HEARTBEATS, "Heartbeats to the launcher, by outcome");
    for (name, what) in GAUGES {
        metrics::describe_gauge!(name, what);
    }
}
