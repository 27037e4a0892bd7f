//! The combined timings of the ranks of a group.

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{Error, ProcessGroup};

use super::{Figures, Sample, slowest, summary};

/// Combines the samples of all ranks. Every rank calls this with its own.
pub(super) fn gather(
    group: &mut ProcessGroup,
    bytes: usize,
    samples: Vec<Sample>,
    path: Option<Path>,
    errors: u64,
) -> Result<Figures, Error> {
    let all = group.all_gather_object(&(samples, path, errors))?;
    let of_ranks = |time: fn(&Sample) -> f64| {
        let times: Vec<Vec<f64>> =
            all.iter().map(|(samples, ..)| samples.iter().map(time).collect()).collect();
        summary(slowest(&times))
    };
    Ok(Figures {
        bytes,
        latency: of_ranks(|sample| sample.latency_us),
        host_us: of_ranks(|sample| sample.host_us).median_us,
        // A rank that takes no part has another path. All return rank 0's, so that all act in the same way.
        path: all.first().and_then(|(_, path, _)| *path),
        errors: all.iter().map(|(.., errors)| errors).sum(),
    })
}
