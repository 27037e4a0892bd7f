//! The combined timings of the ranks of a group.

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{Error, ProcessGroup};
use serde::{Deserialize, Serialize};

use super::statistics::{skew, spreads};
use super::{Figures, Sample, slowest, summary};

/// The samples of one rank, sent to the others.
#[derive(Serialize, Deserialize)]
struct Measurement {
    latency_us: Vec<f64>,
    host_us: Vec<f64>,
    /// Empty if it was not recorded.
    entered_ns: Vec<u64>,
    /// The path of the last call; that of another operation on a rank that does not take part.
    path: Option<Path>,
    errors: u64,
}

/// The timed calls of one group, or of several that called at the same time; the same on all ranks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Samples {
    /// Bytes of the whole array.
    pub(crate) bytes: usize,
    /// The path of the calls on rank 0.
    pub(crate) path: Option<Path>,
    /// Latency of the slowest rank of each call, in microseconds.
    latency_us: Vec<f64>,
    host_us: Vec<f64>,
    /// Spread of the ranks' entries into each call, in microseconds; empty if it was not recorded.
    spread_us: Vec<f64>,
    errors: u64,
}

impl Samples {
    /// Combines the samples of all ranks. Every rank calls this with its own.
    pub(super) fn gather(
        group: &mut ProcessGroup,
        bytes: usize,
        samples: &[Sample],
        path: Option<Path>,
        errors: u64,
    ) -> Result<Self, Error> {
        let mine = Measurement {
            latency_us: samples.iter().map(|s| s.latency_us).collect(),
            host_us: samples.iter().map(|s| s.host_us).collect(),
            entered_ns: samples.iter().filter_map(|s| s.entered_ns).collect(),
            path,
            errors,
        };
        let all = group.all_gather_object(&mine)?;
        let latency: Vec<&[f64]> = all.iter().map(|rank| &rank.latency_us[..]).collect();
        let host: Vec<&[f64]> = all.iter().map(|rank| &rank.host_us[..]).collect();
        let entered: Vec<&[u64]> = all.iter().map(|rank| &rank.entered_ns[..]).collect();
        Ok(Self {
            bytes,
            // The same for all ranks, since all must act on it in the same way.
            path: all.first().and_then(|rank| rank.path),
            latency_us: slowest(&latency),
            host_us: slowest(&host),
            spread_us: spreads(&entered),
            errors: all.iter().map(|rank| rank.errors).sum(),
        })
    }

    /// Returns the figures of the samples.
    pub(crate) fn figures(self) -> Figures {
        Figures {
            bytes: self.bytes,
            latency: summary(self.latency_us),
            host_us: summary(self.host_us).median_us,
            path: self.path,
            errors: self.errors,
            skew: skew(self.spread_us),
        }
    }
}
