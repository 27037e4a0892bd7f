//! What the ranks of a group timed, put together.

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
    /// Empty where it was not noted.
    entered_ns: Vec<u64>,
    /// The path of the last call; another operation's on a rank that does not take part.
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
    /// Of the slowest rank of each call, in microseconds.
    latency_us: Vec<f64>,
    host_us: Vec<f64>,
    /// How far apart the ranks entered each call, in microseconds; empty where that was not noted.
    spread_us: Vec<f64>,
    errors: u64,
}

impl Samples {
    /// Puts those of all ranks together. Every rank calls this with its own.
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
            // The same for all ranks, since all must act on it alike.
            path: all.first().and_then(|rank| rank.path),
            latency_us: slowest(&latency),
            host_us: slowest(&host),
            spread_us: spreads(&entered),
            errors: all.iter().map(|rank| rank.errors).sum(),
        })
    }

    /// Those of several groups as one: the calls of all, on the path of the first.
    pub(crate) fn together(groups: Vec<Self>) -> Option<Self> {
        groups.into_iter().reduce(|mut all, group| {
            all.latency_us.extend(group.latency_us);
            all.host_us.extend(group.host_us);
            all.spread_us.extend(group.spread_us);
            all.errors += group.errors;
            all
        })
    }

    /// What they amount to.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_groups_at_once_count_alike() {
        let group = |us: f64, errors| Samples {
            bytes: 8,
            path: None,
            latency_us: vec![us, us + 1.0],
            host_us: vec![us],
            spread_us: vec![us / 10.0],
            errors,
        };
        let all = Samples::together(vec![group(10.0, 1), group(20.0, 2)]).expect("two groups").figures();
        assert_eq!((all.latency.calls, all.latency.median_us, all.latency.max_us), (4, 11.0, 21.0));
        assert_eq!((all.errors, all.skew.map(|skew| skew.p99_us)), (3, Some(2.0)));
        assert_eq!(Samples::together(Vec::new()), None);
    }
}
