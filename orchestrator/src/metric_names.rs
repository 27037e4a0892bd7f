//! The names of all metrics of this crate, in one place.

/// Connections that did not prove that they belong to the job, or have other settings.
pub use ryzanstein_process_group::security::REFUSED_CONNECTIONS;
/// 1 for this process, with its rank, host and version as labels.
pub const INFO: &str = "ryz_info";

/// Describes each metric to the installed recorder.
pub fn describe() {
    metrics::describe_counter!(
        REFUSED_CONNECTIONS,
        "Connections that were refused, by plane (control or data) and reason"
    );
    metrics::describe_gauge!(INFO, "1, with rank, host and version as labels");
}
