//! Compares figures with the documented targets. Pure.

use ryzanstein_process_group::targets::{ABOVE_GBS, ABOVE_SHARE, TARGETS};
use ryzanstein_process_group::units;

use super::Row;

/// All-reduces of at least this many bytes count for bandwidth.
const LONG: usize = 9_900_000;

/// One documented target and the measured value.
#[derive(Clone, PartialEq, Debug)]
pub struct Verdict {
    /// The subject of the target.
    pub what: String,
    /// The target value.
    pub wanted: String,
    /// The measured value; `None` if the run has none.
    pub measured: Option<String>,
    /// True if the target is met; `None` as for `measured`.
    pub met: Option<bool>,
}

impl Verdict {
    pub(super) fn of(what: String, wanted: String, measured: Option<(String, bool)>) -> Self {
        let (measured, met) = measured.unzip();
        Self { what, wanted, measured, met }
    }
}

/// Returns every documented target for collectives, judged by rows with more than one rank and only right values. A size may be
/// smaller than documented by the remainder of a division among ranks. Of several paths the fastest counts, since users can
/// choose it.
///
/// `link_gbs` is the bandwidth of one link in one direction, in 10⁹ bytes per second, if known.
pub fn verdicts(rows: &[Row], link_gbs: Option<f64>) -> Vec<Verdict> {
    let sent = || rows.iter().filter(|row| row.world_size > 1 && row.errors == 0);
    let mut all: Vec<Verdict> = TARGETS
        .iter()
        .map(|target| {
            let slack = target.bytes / 1000;
            let best = sent()
                .filter(|row| row.what.name() == target.op)
                .filter(|row| (target.bytes - slack..=target.bytes).contains(&(row.bytes as u64)))
                .map(|row| row.median_us)
                .min_by(f64::total_cmp);
            Verdict::of(
                format!("{} {}", target.op, units::bytes(target.bytes as f64)),
                format!("< {}", units::time(target.below_us)),
                best.map(|us| (units::time(us), us < target.below_us)),
            )
        })
        .collect();
    // Short messages do not show the bandwidth.
    let long = sent().filter(|row| row.what.name() == "all_reduce" && row.bytes >= LONG);
    let best = long.map(|row| row.busbw_gbs).max_by(f64::total_cmp);
    all.push(Verdict::of(
        "all_reduce, best bus bandwidth".into(),
        format!("> {ABOVE_GBS} GB/s"),
        best.map(|gbs| (format!("{gbs:.1} GB/s"), gbs > ABOVE_GBS)),
    ));
    let link = link_gbs.filter(|link| *link > 0.0);
    let share = best.zip(link).map(|(best, link)| best / link);
    all.push(Verdict::of(
        link.map_or_else(
            || "all_reduce, share of what a link carries".into(),
            |link| {
                let digits = if link < 10.0 { 2 } else { 0 };
                format!("all_reduce, share of the {link:.digits$} GB/s that a link carries")
            },
        ),
        format!("> {:.0} %", ABOVE_SHARE * 100.0),
        share.map(|share| (format!("{:.1} %", share * 100.0), share > ABOVE_SHARE)),
    ));
    all
}

/// Returns, for each operation, the smallest size whose bus bandwidth is within a tenth of the best: larger messages gain
/// little. Rows with wrong values do not count.
pub fn saturation(rows: &[Row]) -> Vec<(String, &Row)> {
    let mut found: Vec<(String, &Row)> = Vec::new();
    let right: Vec<&Row> = rows.iter().filter(|r| r.errors == 0).collect();
    for row in right.iter().filter(|r| r.busbw_gbs > 0.0) {
        let label = row.label();
        if found.iter().any(|(known, _)| *known == label) {
            continue;
        }
        let same = || right.iter().copied().filter(|r| r.label() == label);
        let best = same().fold(0.0, |most: f64, r| most.max(r.busbw_gbs));
        let smallest = same().filter(|r| r.busbw_gbs >= 0.9 * best).min_by_key(|r| r.bytes);
        found.extend(smallest.map(|row| (label, row)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Collective;
    use crate::suite::tests::{row, wrong_row};

    fn met(rows: &[Row], link: Option<f64>) -> Vec<Option<bool>> {
        verdicts(rows, link).into_iter().map(|v| v.met).collect()
    }

    #[test]
    fn each_target_is_judged_at_its_own_size_and_operation() {
        let rows = [
            row(Collective::AllReduce, 100_000, 499.0),
            row(Collective::AllReduce, 10_000_000, 1000.0),
            row(Collective::Broadcast, 99_999_996, 4999.0),
            row(Collective::AllGather, 100_000_000, 1.0),
        ];
        assert_eq!(met(&rows, None)[..4], [Some(true), Some(false), None, Some(true)]);
        assert_eq!(met(&[], Some(1.0)), [None; 6]);
    }

    #[test]
    fn bandwidth_is_judged_by_the_best_all_reduce() {
        // 4 ranks: 100 MB in 1 ms are 100 GB/s, and 150 GB/s on the bus.
        let rows = [row(Collective::AllReduce, 1000, 50.0), row(Collective::AllReduce, 100_000_000, 1000.0)];
        assert_eq!(met(&rows, None)[4..6], [Some(true), None]);
        assert_eq!(met(&rows, Some(160.0))[4..6], [Some(true), Some(true)]);
        assert_eq!(met(&rows, Some(170.0))[5], Some(false));
        assert_eq!(met(&rows[..1], Some(1.0))[4..6], [None, None], "1 KB says nothing of bandwidth");
        assert_eq!(met(&[row(Collective::AllReduce, 10_000_000, 900.0)], None)[4], Some(false));
    }

    #[test]
    fn the_quickest_path_with_right_values_counts() {
        let wrong = || wrong_row(Collective::AllReduce, 10_000_000, 1.0, 3);
        let rows = [wrong(), row(Collective::AllReduce, 10_000_000, 2000.0)];
        let judged = verdicts(&rows, None);
        assert_eq!((judged[1].met, judged[4].met), (Some(false), Some(false)), "{judged:?}");
        assert_eq!(saturation(&rows)[0].1.errors, 0);
        assert_eq!(met(&[wrong()], None), [None; 6]);
        assert_eq!(saturation(&[wrong()]), []);
    }

    #[test]
    fn one_rank_alone_meets_nothing_as_it_sends_nothing() {
        let mut alone = row(Collective::AllReduce, 100_000, 0.1);
        alone.world_size = 1;
        assert_eq!(met(&[alone], Some(1.0)), [None; 6]);
    }

    #[test]
    fn enough_is_the_smallest_size_near_the_best_bandwidth() {
        let rows = [
            row(Collective::AllReduce, 1000, 100.0),
            row(Collective::AllReduce, 1_000_000, 1000.0),
            row(Collective::AllReduce, 4_000_000, 3900.0),
            row(Collective::Barrier, 0, 10.0),
        ];
        let found: Vec<_> = saturation(&rows).into_iter().map(|(label, row)| (label, row.bytes)).collect();
        assert_eq!(found, [("all_reduce".to_owned(), 1_000_000)]);
    }
}
