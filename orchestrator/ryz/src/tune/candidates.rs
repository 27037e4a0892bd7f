//! Settings of NCCL that are measured against its own choice, and the selection of the best. Pure.

use ryzanstein_config::{Config, NcclProfile};
use ryzanstein_process_group::units;

use super::crossover::GAIN;
use super::nccl::{ENV, Proposal, TREE};
use ryzanstein_benches::measure::{Summary, summary};

/// A setting to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// The dotted key.
    pub key: &'static str,
    /// The value.
    pub value: &'static str,
}

impl Candidate {
    /// Returns the environment variable that sets it in a process that we start.
    pub fn variable(&self) -> &'static str {
        self.key.strip_prefix(ENV).unwrap_or("RYZ_NCCL__PROFILE")
    }

    /// Returns true if the configuration leaves the setting to NCCL.
    pub fn is_unset(&self, config: &Config) -> bool {
        match self.key.strip_prefix(ENV) {
            Some(name) => config.nccl.env.get(name).is_none(),
            None => config.nccl.profile == NcclProfile::None,
        }
    }
}

/// The measured candidates. NCCL's own choice has all protocols, among them `LL128`, which cannot be forced safely.
pub const CANDIDATES: [Candidate; 6] = [
    Candidate { key: "nccl.env.NCCL_ALGO", value: "Ring" },
    Candidate { key: "nccl.env.NCCL_ALGO", value: TREE },
    Candidate { key: "nccl.env.NCCL_PROTO", value: "LL" },
    Candidate { key: "nccl.env.NCCL_PROTO", value: "Simple" },
    Candidate { key: "nccl.profile", value: "inference" },
    Candidate { key: "nccl.profile", value: "bandwidth" },
];

/// The medians of one choice, in microseconds: of each round, those of all sizes.
pub type Measured = Vec<Vec<f64>>;

/// Returns the candidate to propose, if one is worth it. It holds for all sizes: it must be clearly faster than NCCL's own
/// choice at the size that counts, the first, and clearly slower at none. Of several, it is the fastest at the first size.
pub fn pick(sizes: &[u64], own: &Measured, candidates: &[(Candidate, Measured)]) -> Option<Proposal> {
    let at = |measured: &Measured, size: usize| -> Summary {
        summary(measured.iter().filter_map(|round| round.get(size).copied()).collect())
    };
    let gains = |measured: &Measured| at(own, 0).is_slower(&at(measured, 0), GAIN / (1.0 - GAIN));
    let loses =
        |measured: &Measured| (0..sizes.len()).any(|size| at(measured, size).is_slower(&at(own, size), GAIN));
    let is_measured = |measured: &Measured| !measured.is_empty() && !own.is_empty();
    let good = candidates
        .iter()
        .filter(|(_, measured)| is_measured(measured) && gains(measured) && !loses(measured));
    let (best, measured) = good.min_by(|(_, a), (_, b)| at(a, 0).median_us.total_cmp(&at(b, 0).median_us))?;
    Some(Proposal {
        key: best.key,
        value: best.value.into(),
        reason: format!(
            "measured: an all-reduce of {} takes {}, and {} with NCCL's own choice",
            units::bytes(*sizes.first()? as f64),
            units::time(at(measured, 0).median_us),
            units::time(at(own, 0).median_us)
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(first: f64, second: f64) -> Measured {
        (0..5).map(|round| vec![first + f64::from(round) * 0.1, second + f64::from(round) * 0.1]).collect()
    }

    #[test]
    fn only_a_clear_gain_without_a_loss_elsewhere_is_proposed() {
        let [ring, tree, ll, ..] = CANDIDATES;
        let own = rounds(100.0, 1000.0);
        let pick = |candidates: &[(Candidate, Measured)]| pick(&[1000, 1_000_000], &own, candidates);
        assert_eq!(pick(&[(ring, rounds(95.0, 1000.0))]), None, "5 % is no gain");
        assert_eq!(pick(&[(ll, rounds(50.0, 2000.0))]), None, "it loses at the other size");
        let found =
            pick(&[(ring, rounds(80.0, 1000.0)), (tree, rounds(70.0, 1000.0)), (ll, rounds(50.0, 2000.0))]);
        let found = found.expect("the tree");
        assert_eq!((found.key, found.value.as_str()), ("nccl.env.NCCL_ALGO", TREE));
        assert!(found.reason.contains("1 KB takes 70.2 us, and 100 us"), "{}", found.reason);
        assert_eq!(pick(&[(ring, Vec::new())]), None, "nothing was measured");
    }
}
