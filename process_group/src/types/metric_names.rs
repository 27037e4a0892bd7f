//! The metrics of this crate, in one table, which is compared with the exported ones, the described ones and the list of the book.
//!
//! They go to the recorder of the crate `metrics` that the process has installed; without one they cost nothing.

use std::fmt;

/// The kind of a metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A number that only grows, from 0 at the start of the process.
    Counter,
    /// A number that changes.
    Gauge,
    /// A distribution: the count, the sum, and the counts up to each of several bounds.
    Histogram,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        })
    }
}

/// A metric. Its unit is part of its name: seconds, bytes, or else a number of the named things.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its labels. The exporter adds `rank` to all metrics of a rank.
    pub labels: &'static [&'static str],
    /// Its meaning, in one sentence without a full stop.
    pub meaning: &'static str,
}

impl Metric {
    /// Returns the unit, with which the name ends; a dash for plain numbers.
    pub fn unit(&self) -> &'static str {
        let name = self.name.trim_end_matches("_total");
        ["seconds", "bytes"].into_iter().find(|unit| name.ends_with(unit)).unwrap_or("–")
    }

    /// Describes this metric to the installed recorder.
    pub fn describe(&self) {
        match self.kind {
            Kind::Counter => metrics::describe_counter!(self.name, self.meaning),
            Kind::Gauge => metrics::describe_gauge!(self.name, self.meaning),
            Kind::Histogram => metrics::describe_histogram!(self.name, self.meaning),
        }
    }
}

/// The labels of a class of calls.
const CLASS: &[&str] = &["rank", "group", "op", "reduction", "dtype", "bytes_up_to", "path"];

/// Calls.
pub const CALLS: Metric = Metric {
    name: "ryz_collective_calls_total",
    kind: Kind::Counter,
    labels: CLASS,
    meaning: "Calls that succeeded or, on a GPU, were enqueued",
};
/// Bytes of calls.
pub const BYTES: Metric = Metric {
    name: "ryz_collective_bytes_total",
    kind: Kind::Counter,
    labels: CLASS,
    meaning: "Bytes of these calls: of the whole array, as nccl-tests count them",
};
/// Latencies.
pub const SECONDS: Metric = Metric {
    name: "ryz_collective_seconds",
    kind: Kind::Histogram,
    labels: CLASS,
    meaning: "This rank's time in a call, waiting for other ranks included; on a GPU of the calls that were timed",
};
/// Waits for late ranks.
pub const WAIT_SECONDS: Metric = Metric {
    name: "ryz_collective_wait_seconds",
    kind: Kind::Histogram,
    labels: &["rank", "group", "op"],
    meaning: "How long this rank waited in a call for ranks that came late, where that was more than 2 ms; TCP backend",
};
/// Calls that failed.
pub const ERRORS: Metric = Metric {
    name: "ryz_collective_errors_total",
    kind: Kind::Counter,
    labels: &["rank", "group", "op", "kind"],
    meaning: "Calls that failed, by kind of error",
};
/// Rejected connections.
pub const REFUSED_CONNECTIONS: Metric = Metric {
    name: "ryz_connections_refused_total",
    kind: Kind::Counter,
    labels: &["plane", "reason"],
    meaning: "Connections that were refused: to the rendezvous (plane `control`), which the launcher or, under another one, rank 0 serves, and to a rank (plane `data`)",
};
/// The epoch.
pub const EPOCH: Metric = Metric {
    name: "ryz_epoch",
    kind: Kind::Gauge,
    labels: &["rank"],
    meaning: "The epoch that this rank has joined; the first is 1, and each restart of the job adds 1",
};
/// The world size.
pub const WORLD_SIZE: Metric =
    Metric { name: "ryz_world_size", kind: Kind::Gauge, labels: &["rank"], meaning: "Ranks of the job" };
/// Groups.
pub const GROUPS: Metric = Metric {
    name: "ryz_groups",
    kind: Kind::Gauge,
    labels: &["rank"],
    meaning: "Process groups that this rank has now",
};

/// Every metric of this crate.
pub const ALL: &[Metric] =
    &[CALLS, BYTES, SECONDS, WAIT_SECONDS, ERRORS, REFUSED_CONNECTIONS, EPOCH, WORLD_SIZE, GROUPS];
