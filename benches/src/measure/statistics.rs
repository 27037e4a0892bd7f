//! Statistics over the latencies of calls on all ranks. Pure.

/// Percentiles of a run of calls, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Summary {
    /// Number of calls.
    pub calls: usize,
    /// 25th percentile.
    pub p25_us: f64,
    /// Median.
    pub median_us: f64,
    /// 75th percentile.
    pub p75_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Largest.
    pub max_us: f64,
}

impl Summary {
    /// Returns half the notch of a box plot: medians whose notches do not overlap differ at the level of 5 % (R. `McGill`, J.
    /// Tukey and W. Larsen, "Variations of box plots", 1978).
    fn half_notch(&self) -> f64 {
        1.57 * (self.p75_us - self.p25_us) / (self.calls.max(1) as f64).sqrt()
    }

    /// Returns true if this is slower than `other` by more than the share `tolerance`, and by more than chance: the notches or the
    /// boxes of the two do not overlap.
    pub fn is_slower(&self, other: &Self, tolerance: f64) -> bool {
        let notches = self.median_us - self.half_notch() > other.median_us + other.half_notch();
        let boxes = self.p25_us > other.p75_us;
        self.median_us > other.median_us * (1.0 + tolerance) && (notches || boxes)
    }
}

/// Returns the slowest rank's latency of each call: a collective is complete when its last rank is.
pub fn slowest<T: AsRef<[f64]>>(of_ranks: &[T]) -> Vec<f64> {
    let calls = of_ranks.iter().map(|rank| rank.as_ref().len()).min().unwrap_or(0);
    let of_call = |call: usize| of_ranks.iter().fold(0.0, |most: f64, rank| most.max(rank.as_ref()[call]));
    (0..calls).map(of_call).collect()
}

/// Returns the median, as [`summary`] does: of an even number of values the lower one. Zero without values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    percentile(&values, 0.5)
}

/// Returns the percentiles of latencies; all zero without latencies.
pub fn summary(mut latencies: Vec<f64>) -> Summary {
    latencies.sort_by(f64::total_cmp);
    let at = |share| percentile(&latencies, share);
    Summary {
        calls: latencies.len(),
        p25_us: at(0.25),
        median_us: at(0.5),
        p75_us: at(0.75),
        p90_us: at(0.9),
        p99_us: at(0.99),
        max_us: at(1.0),
    }
}

/// Returns the nearest-rank percentile: with few values the 99th percentile is the maximum.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let index = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(index.max(1) - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_as_slow_as_its_slowest_rank() {
        // Each rank is quick on average; every call has a slow one.
        assert_eq!(slowest(&[&[1.0, 9.0, 1.0], &[9.0, 1.0, 2.0]]), [9.0, 9.0, 2.0]);
        assert_eq!(slowest::<&[f64]>(&[]), [0.0; 0]);
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let hundred = summary((1..=100).rev().map(f64::from).collect());
        assert_eq!(
            (hundred.median_us, hundred.p90_us, hundred.p99_us, hundred.max_us),
            (50.0, 90.0, 99.0, 100.0)
        );
        let three = summary(vec![3.0, 1.0, 2.0]);
        assert_eq!((three.calls, three.median_us, three.p99_us), (3, 2.0, 3.0));
        assert_eq!(summary(Vec::new()), Summary::default());
    }
}
