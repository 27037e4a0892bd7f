//! The names of all metrics of this crate, in one place.

/// Connections to the rendezvous that did not prove to belong to the job.
pub const REFUSED_CONNECTIONS: &str = "ryz_rendezvous_refused_connections_total";
/// 1 for this process, with its rank, host and version as labels.
pub const INFO: &str = "ryz_info";

/// Tells the recorder in force what each metric means.
pub fn describe() {
    metrics::describe_counter!(
        REFUSED_CONNECTIONS,
        "Connections to the rendezvous that did not prove to belong to the job"
    );
    metrics::describe_gauge!(INFO, "1, with rank, host and version as labels");
}
