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
/// Connections to the rendezvous that were refused.
pub const REFUSED_CONNECTIONS: Metric = Metric {
    name: "ryz_rendezvous_refused_connections_total",
    kind: Kind::Counter,
    labels: &["reason"],
    meaning: "Connections to the rendezvous that it refused; it is served by the launcher or, under another one, by rank 0",
};

/// Every metric of this crate.
pub const OWN: &[Metric] = &[INFO, RESTARTS, REFUSED_CONNECTIONS];

/// Every metric of this crate and of the groups.
pub fn all() -> impl Iterator<Item = &'static Metric> {
    OWN.iter().chain(ryzanstein_process_group::metric_names::ALL)
}

/// Describes each metric to the installed recorder.
pub fn describe() {
    all().for_each(Metric::describe);
}
