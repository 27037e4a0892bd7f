//! The result of `ryz bench`, and whether it is correct and meets the targets.

use super::{Row, Verdict, verdicts};

/// A whole result.
#[derive(Clone, Debug)]
pub struct Report {
    /// A few lines about what was measured where.
    pub heading: String,
    /// Every row, as measured.
    pub rows: Vec<Row>,
    /// The bandwidth of one link in one direction, in 10⁹ bytes per second, if known.
    pub link_gbs: Option<f64>,
}

impl Report {
    /// Every value was right.
    pub fn is_correct(&self) -> bool {
        self.rows.iter().all(|row| row.errors == 0)
    }

    /// No target was missed.
    pub fn meets_targets(&self) -> bool {
        self.rows.iter().all(|row| row.meets_target != Some(false))
            && self.verdicts().iter().all(|verdict| verdict.met != Some(false))
    }

    /// Every documented target.
    pub fn verdicts(&self) -> Vec<Verdict> {
        verdicts(&self.rows, self.link_gbs)
    }
}
