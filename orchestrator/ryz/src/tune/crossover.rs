//! Computes from times the sizes at which another path is worth taking. Pure.

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::paths::tuned::{Measurement, TunedRange};

use ryzanstein_benches::measure::Summary;

/// The share by which a path must be faster than the one that it replaces.
const GAIN: f64 = 0.1;

/// The times of one size on every path.
#[derive(Clone, PartialEq, Debug)]
pub struct Timed {
    /// Bytes of the whole array.
    pub bytes: u64,
    /// The path that the built-in table takes.
    pub built_in: Path,
    /// Every path that has the operation.
    pub paths: Vec<(Path, Summary)>,
}

impl Timed {
    /// Returns the times on a path.
    pub fn on(&self, path: Path) -> Option<&Summary> {
        self.paths.iter().find(|(of, _)| *of == path).map(|(_, times)| times)
    }

    /// Returns the ratio of the built-in path's time to that of another.
    pub fn gain(&self, path: Path) -> Option<f64> {
        Some(self.on(self.built_in)?.median_us / self.on(path)?.median_us)
    }

    /// Returns the fastest path and its times.
    pub fn quickest(&self) -> Option<&(Path, Summary)> {
        self.paths.iter().min_by(|(_, a), (_, b)| a.median_us.total_cmp(&b.median_us))
    }
}

/// Returns true if `new` is faster than `old` by more than [`GAIN`], and by more than chance.
fn is_gain(new: &Summary, old: &Summary) -> bool {
    old.is_slower(new, GAIN / (1.0 - GAIN))
}

/// Returns the path for each size in order of size; `None` where the built-in one stays. A size keeps the path of the size
/// before, if that is a gain and no other is a gain over it: paths change only where the change is worth it.
pub fn choose(sizes: &[Timed]) -> Vec<Option<Path>> {
    let mut chosen: Vec<Option<Path>> = Vec::with_capacity(sizes.len());
    for timed in sizes {
        chosen.push(choose_one(timed, chosen.last().copied().flatten()));
    }
    chosen
}

/// Returns the path for one size. `before` is the path of the size before.
fn choose_one(timed: &Timed, before: Option<Path>) -> Option<Path> {
    let built_in = timed.on(timed.built_in)?;
    let (quickest, times) = timed.quickest().filter(|(_, times)| is_gain(times, built_in))?;
    let stays =
        |path: &Path| timed.on(*path).is_some_and(|old| is_gain(old, built_in) && !is_gain(times, old));
    Some(before.filter(stays).unwrap_or(*quickest))
}

/// Returns the lines of a table for one operation: a chosen path is taken from the size where it was measured until before the
/// next measured size, and after the last only at that size. `sizes` are all that were measured, in order.
pub fn ranges(operation: &str, world_size: usize, date: &str, sizes: &[Timed]) -> Vec<TunedRange> {
    let mut ranges: Vec<TunedRange> = Vec::new();
    for (index, (timed, path)) in sizes.iter().zip(choose(sizes)).enumerate() {
        let Some((path, gain)) = path.and_then(|path| Some((path, timed.gain(path)?))) else { continue };
        let bytes = timed.bytes;
        let to_bytes = sizes.get(index + 1).map_or(bytes, |next| next.bytes - 1);
        let median = |path| hundredths(timed.on(path).map_or(0.0, |times| times.median_us));
        let measured = Measurement {
            date: date.to_owned(),
            bytes,
            us: median(path),
            against: timed.built_in,
            against_us: median(timed.built_in),
        };
        match ranges.last_mut() {
            Some(last) if last.path == path && last.to_bytes + 1 == bytes => {
                last.to_bytes = to_bytes;
                // The least gain represents the whole range.
                if gain < last.measured.against_us / last.measured.us {
                    last.measured = measured;
                }
            }
            _ => ranges.push(TunedRange {
                world_size,
                operation: operation.to_owned(),
                from_bytes: bytes,
                to_bytes,
                path,
                measured,
            }),
        }
    }
    ranges
}

/// Rounds a time as it is written: in hundredths of a microsecond.
fn hundredths(us: f64) -> f64 {
    (us * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ryzanstein_process_group::paths::tuned::{Machine, TuningTable};
    use ryzanstein_process_group::schedule::Algorithm;

    use super::*;

    const RING: Path = Path::Tcp(Algorithm::Ring);
    const DIRECT: Path = Path::Tcp(Algorithm::Direct);
    const DOUBLING: Path = Path::Tcp(Algorithm::RecursiveDoubling);

    /// Returns nine rounds whose middle half spreads over `spread`.
    fn times(median_us: f64, spread: f64) -> Summary {
        let (p25_us, p75_us) = (median_us - spread / 2.0, median_us + spread / 2.0);
        Summary { calls: 9, p25_us, median_us, p75_us, p90_us: p75_us, p99_us: p75_us, max_us: p75_us }
    }

    fn timed(bytes: u64, built_in: Path, paths: &[(Path, f64)]) -> Timed {
        Timed { bytes, built_in, paths: paths.iter().map(|(path, us)| (*path, times(*us, 1.0))).collect() }
    }

    #[test]
    fn a_path_is_taken_from_the_size_where_it_is_clearly_quicker() {
        let of = |direct: f64| [timed(1, RING, &[(RING, 100.0), (DIRECT, direct)])];
        assert_eq!(choose(&of(50.0)), [Some(DIRECT)]);
        assert_eq!(choose(&of(88.0)), [Some(DIRECT)]);
        assert_eq!(choose(&of(92.0)), [None], "a gain of 8 % is none");
        assert_eq!(choose(&of(200.0)), [None]);
        let noisy = Timed {
            bytes: 1,
            built_in: RING,
            paths: vec![(RING, times(100.0, 60.0)), (DIRECT, times(70.0, 60.0))],
        };
        assert_eq!(choose(&[noisy]), [None], "the notches of the medians overlap");
        assert_eq!(choose(&[timed(1, RING, &[])]), [None], "nothing was measured");
    }

    #[test]
    fn a_path_stays_until_another_is_worth_the_change() {
        let sizes = [
            timed(1, RING, &[(RING, 100.0), (DIRECT, 50.0), (DOUBLING, 60.0)]),
            // The other path is slightly faster here.
            timed(2, RING, &[(RING, 100.0), (DIRECT, 52.0), (DOUBLING, 50.0)]),
            timed(3, RING, &[(RING, 100.0), (DIRECT, 80.0), (DOUBLING, 50.0)]),
            timed(4, RING, &[(RING, 100.0), (DIRECT, 99.0), (DOUBLING, 99.0)]),
        ];
        assert_eq!(choose(&sizes), [Some(DIRECT), Some(DIRECT), Some(DOUBLING), None]);
    }

    #[test]
    fn ranges_end_where_the_next_measured_size_begins() {
        let of = |bytes, direct, doubling| {
            timed(bytes, RING, &[(RING, 100.0), (DIRECT, direct), (DOUBLING, doubling)])
        };
        let sizes =
            [of(1000, 50.0, 99.0), of(4000, 60.0, 99.0), of(16_000, 99.0, 99.0), of(64_000, 99.0, 50.0)];
        let lines = ranges("all_reduce", 4, "2026-11-22", &sizes);
        let shape: Vec<_> = lines.iter().map(|l| (l.from_bytes, l.to_bytes, l.path)).collect();
        assert_eq!(
            shape,
            [(1000, 15_999, DIRECT), (64_000, 64_000, DOUBLING)],
            "no other path is worth it at 16 KB"
        );
        let least = &lines[0].measured;
        assert_eq!((least.bytes, least.us, least.against_us, least.against), (4000, 60.0, 100.0, RING));
    }

    proptest! {
        #[test]
        fn whatever_was_measured_makes_a_table_that_can_be_read_again(
            factors in proptest::collection::vec((0.3..3.0f64, 0.3..3.0f64, 0.3..3.0f64), 1..12),
        ) {
            let sizes: Vec<Timed> = factors.iter().enumerate().map(|(index, (ring, direct, doubling))| {
                let us = 100.0;
                timed(1000 << index, RING, &[(RING, us * ring), (DIRECT, us * direct), (DOUBLING, us * doubling)])
            }).collect();
            let lines = ranges("broadcast", 3, "2026-11-22", &sizes);
            // Every size with another path is in exactly one line, and no other size is in any.
            for (timed, path) in sizes.iter().zip(choose(&sizes)) {
                let with_it = lines.iter().filter(|l| l.from_bytes <= timed.bytes && timed.bytes <= l.to_bytes);
                let taken: Vec<Path> = with_it.map(|line| line.path).collect();
                prop_assert!(path.is_none_or(|path| timed.gain(path) > Some(1.1)), "{timed:?}");
                let wanted: Vec<Path> = path.into_iter().collect();
                prop_assert_eq!(taken, wanted);
            }
            let machine = Machine { cpu: "a CPU".into(), cpus: 2, gpus: String::new() };
            let mut table = TuningTable::new(machine.clone());
            table.replace(3, false, &["broadcast"], lines);
            prop_assert_eq!(TuningTable::parse(&table.json(), &machine).unwrap(), table);
        }
    }
}
