//! The names of all metrics of this crate, in one place.

/// Connections to the rendezvous that failed to authenticate.
pub const REFUSED_CONNECTIONS: &str = "ryz_rendezvous_refused_connections_total";
/// 1 for this process, with its rank, host and version as labels.
pub const INFO: &str = "ryz_info";

/// Describes each metric to the installed recorder.
pub fn describe() {
    metrics::describe_counter!(
        REFUSED_CONNECTIONS,
        "Connections to the rendezvous that failed to authenticate"
    );
    metrics::describe_gauge!(INFO, "1, with rank, host and version as labels");
}
