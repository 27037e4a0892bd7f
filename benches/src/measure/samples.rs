//! The combined timings of the ranks of a group.

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{Error, ProcessGroup};
use serde::{Deserialize, Serialize};

use super::{Figures, Sample, slowest, summary};

/// The samples of one rank, sent to the others.
#[derive(Serialize, Deserialize)]
struct Measurement {
    latency_us: Vec<f64>,
    host_us: Vec<f64>,
    /// The path of the last call; that of another operation on a rank that does not take part.
    path: Option<Path>,
    errors: u64,
}

/// Combines the samples of all ranks. Every rank calls this with its own.
pub(super) fn gather(
    group: &mut ProcessGroup,
    bytes: usize,
    samples: &[Sample],
    path: Option<Path>,
    errors: u64,
) -> Result<Figures, Error> {
    let mine = Measurement {
        latency_us: samples.iter().map(|s| s.latency_us).collect(),
        host_us: samples.iter().map(|s| s.host_us).collect(),
        path,
        errors,
    };
    let all = group.all_gather_object(&mine)?;
    let latency: Vec<&[f64]> = all.iter().map(|rank| &rank.latency_us[..]).collect();
    let host: Vec<&[f64]> = all.iter().map(|rank| &rank.host_us[..]).collect();
    Ok(Figures {
        bytes,
        latency: summary(slowest(&latency)),
        host_us: summary(slowest(&host)).median_us,
        // The same for all ranks, since all must act on it in the same way.
        path: all.first().and_then(|rank| rank.path),
        errors: all.iter().map(|rank| rank.errors).sum(),
    })
}
