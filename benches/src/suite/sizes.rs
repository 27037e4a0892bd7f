//! Chooses the sizes to measure. Pure.

use ryzanstein_process_group::Error;
use ryzanstein_process_group::targets::TARGETS;

/// A geometric sweep of sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sweep {
    /// Smallest size in bytes.
    pub min: u64,
    /// Largest size in bytes.
    pub max: u64,
    /// Ratio between two sizes.
    pub factor: u64,
}

impl Default for Sweep {
    fn default() -> Self {
        Self { min: 1000, max: 100_000_000, factor: 4 }
    }
}

impl Sweep {
    /// Returns the sizes of the sweep, always including the largest.
    ///
    /// # Errors
    /// [`Error::Configuration`] for an empty or endless sweep.
    pub fn sizes(self) -> Result<Vec<u64>, Error> {
        let Self { min, max, factor } = self;
        if min == 0 || min > max {
            return Err(Error::Configuration(format!(
                "sizes from {min} to {max} bytes: --min-bytes must be at least 1 and not above --max-bytes"
            )));
        }
        if factor < 2 {
            return Err(Error::Configuration(format!(
                "--factor {factor}: each size is so many times the one before; it must be at least 2"
            )));
        }
        let next = |size: &u64| size.checked_mul(factor).filter(|size| *size < max);
        let mut sizes: Vec<u64> = std::iter::successors(Some(min), next).collect();
        if min < max {
            sizes.push(max);
        }
        Ok(sizes)
    }

    /// Returns the sizes of the sweep, and those within it that have a documented target.
    ///
    /// # Errors
    /// Returns the errors of [`sizes`](Self::sizes).
    pub fn with_documented(self) -> Result<Vec<u64>, Error> {
        let mut sizes = self.sizes()?;
        sizes.extend(TARGETS.iter().map(|t| t.bytes).filter(|bytes| (self.min..=self.max).contains(bytes)));
        sizes.sort_unstable();
        sizes.dedup();
        Ok(sizes)
    }
}

/// Returns the default number of timed calls: enough for percentiles where calls are short, few where they are long.
pub(super) fn iterations(bytes: u64, is_host: bool) -> usize {
    let (work, least, most) = if is_host { (200_000_000, 9, 1000) } else { (2_000_000_000, 20, 400) };
    usize::try_from(work / bytes.max(1)).unwrap_or(most).clamp(least, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_ends_with_the_largest_size_whether_or_not_the_factor_hits_it() {
        let sizes = |min, max, factor| Sweep { min, max, factor }.sizes().unwrap();
        assert_eq!(sizes(1000, 64_000, 4), [1000, 4000, 16_000, 64_000]);
        assert_eq!(sizes(1000, 10_000, 4), [1000, 4000, 10_000]);
        assert_eq!(sizes(7, 7, 2), [7]);
        assert_eq!(sizes(1, u64::MAX, 1 << 40), [1, 1 << 40, u64::MAX]);
    }

    #[test]
    fn the_default_sweep_has_every_documented_size() {
        let sizes = Sweep::default().with_documented().unwrap();
        assert!(TARGETS.iter().all(|t| sizes.contains(&t.bytes)), "{sizes:?}");
        assert!(sizes.is_sorted_by(|a, b| a < b) && sizes[0] == 1000, "{sizes:?}");
    }

    #[test]
    fn sweeps_without_sizes_or_without_end_are_refused() {
        for (min, max, factor, word) in
            [(0, 9, 2, "--min-bytes"), (9, 8, 2, "--max-bytes"), (1, 9, 1, "--factor"), (1, 9, 0, "--factor")]
        {
            let error = Sweep { min, max, factor }.sizes().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn short_calls_are_repeated_more_often() {
        assert_eq!((iterations(1000, true), iterations(100_000_000, true)), (1000, 9));
        assert_eq!((iterations(0, false), iterations(100_000_000, false)), (400, 20));
    }
}
