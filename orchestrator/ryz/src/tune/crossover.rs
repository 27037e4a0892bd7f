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

/// A size that was measured again, untuned and tuned in turn.
#[derive(Clone, PartialEq, Debug)]
pub struct Turn {
    /// Bytes of the whole array.
    pub bytes: u64,
    /// The path of the built-in table.
    pub built_in: Path,
    /// The path that was chosen.
    pub path: Path,
    /// The times of the built-in path.
    pub untuned: Summary,
    /// The times of the chosen path.
    pub tuned: Summary,
}

impl Turn {
    /// Returns true if the gain was confirmed by the second measurement. Only then is the path taken.
    pub fn is_confirmed(&self) -> bool {
        is_gain(&self.tuned, &self.untuned)
    }

    /// Returns the ratio of the untuned to the tuned time.
    pub fn ratio(&self) -> f64 {
        self.untuned.median_us / self.tuned.median_us
    }
}

/// Returns the lines of a table for one operation: a confirmed path is taken from the size where it was measured until before
/// the next measured size, and after the last only at that size. `sizes` are all that were measured, in order.
pub fn ranges(
    operation: &str,
    world_size: usize,
    date: &str,
    sizes: &[u64],
    turns: &[Turn],
) -> Vec<TunedRange> {
    let mut ranges: Vec<TunedRange> = Vec::new();
    for (index, &bytes) in sizes.iter().enumerate() {
        let Some(turn) = turns.iter().find(|turn| turn.bytes == bytes && turn.is_confirmed()) else {
            continue;
        };
        let to_bytes = sizes.get(index + 1).map_or(bytes, |next| next - 1);
        let measured = Measurement {
            date: date.to_owned(),
            bytes,
            us: hundredths(turn.tuned.median_us),
            against: turn.built_in,
            against_us: hundredths(turn.untuned.median_us),
        };
        match ranges.last_mut() {
            Some(last) if last.path == turn.path && last.to_bytes + 1 == bytes => {
                last.to_bytes = to_bytes;
                // The least gain represents the whole range.
                if turn.ratio() < last.measured.against_us / last.measured.us {
                    last.measured = measured;
                }
            }
            _ => ranges.push(TunedRange {
                world_size,
                operation: operation.to_owned(),
                from_bytes: bytes,
                to_bytes,
                path: turn.path,
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

    fn turn(bytes: u64, path: Path, untuned: f64, tuned: f64) -> Turn {
        Turn { bytes, built_in: RING, path, untuned: times(untuned, 1.0), tuned: times(tuned, 1.0) }
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
        let turns = [
            turn(1000, DIRECT, 100.0, 50.0),
            turn(4000, DIRECT, 100.0, 60.0),
            turn(16_000, DIRECT, 100.0, 99.0),
            turn(64_000, DOUBLING, 100.0, 50.0),
        ];
        let lines = ranges("all_reduce", 4, "2026-11-22", &[1000, 4000, 16_000, 64_000], &turns);
        let shape: Vec<_> = lines.iter().map(|l| (l.from_bytes, l.to_bytes, l.path)).collect();
        assert_eq!(
            shape,
            [(1000, 15_999, DIRECT), (64_000, 64_000, DOUBLING)],
            "what is not confirmed is left out"
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
            let bytes: Vec<u64> = sizes.iter().map(|timed| timed.bytes).collect();
            let turns: Vec<Turn> = sizes.iter().zip(choose(&sizes)).filter_map(|(timed, path)| {
                let (path, untuned) = (path?, timed.on(RING)?);
                Some(Turn { bytes: timed.bytes, built_in: RING, path, untuned: *untuned, tuned: *timed.on(path)? })
            }).collect();
            for turn in &turns {
                prop_assert!(turn.ratio() > 1.1 && turn.is_confirmed(), "{turn:?}");
            }
            let lines = ranges("broadcast", 3, "2026-11-22", &bytes, &turns);
            // Every confirmed size is in exactly one line, and no other size is in any.
            for timed in &sizes {
                let with_it = lines.iter().filter(|l| l.from_bytes <= timed.bytes && timed.bytes <= l.to_bytes);
                let taken: Vec<Path> = with_it.map(|line| line.path).collect();
                let wanted: Vec<Path> = turns.iter().filter(|t| t.bytes == timed.bytes).map(|t| t.path).collect();
                prop_assert_eq!(taken, wanted);
            }
            let machine = Machine { cpu: "a CPU".into(), cpus: 2, gpus: String::new() };
            let mut table = TuningTable::new(machine.clone());
            table.replace(3, false, &["broadcast"], lines);
            prop_assert_eq!(TuningTable::parse(&table.json(), &machine).unwrap(), table);
        }
    }
}
