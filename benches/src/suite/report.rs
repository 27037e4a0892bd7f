//! The result of `ryz bench`, its correctness, and its comparison with the targets.

use std::num::NonZero;

use super::steps::{self, StepRow};
use super::{Row, Verdict, verdicts};
use crate::communication::JobContext;
use ryzanstein_orchestrator::table::Screen;

/// A whole result.
#[derive(Clone, Debug)]
pub struct Report {
    /// A few lines about the measurement and the machine.
    pub heading: String,
    /// True if the rows are compared with the documented targets, which are for GPUs.
    pub judged: bool,
    /// All rows, as measured.
    pub rows: Vec<Row>,
    /// The bandwidth of one link in one direction, in 10⁹ bytes per second, if known.
    pub link_gbs: Option<f64>,
    /// Steps of a model's layers and their context, if they were measured.
    pub steps: Option<(Vec<StepRow>, JobContext)>,
}

impl Report {
    /// Returns true if every value was right.
    pub fn is_correct(&self) -> bool {
        self.rows.iter().all(|row| row.errors == 0) && self.step_rows().iter().all(|row| row.correct)
    }

    /// Returns the documented targets that were missed, with their measured values.
    pub fn missed_targets(&self) -> Vec<String> {
        let missed = self.verdicts().into_iter().filter(|verdict| verdict.met == Some(false));
        missed
            .map(|Verdict { what, wanted, measured, .. }| {
                format!("{what} ({}, wanted {wanted})", measured.unwrap_or_default())
            })
            .collect()
    }

    /// Returns the documented targets that were not measured.
    pub fn unmeasured_targets(&self) -> Vec<String> {
        self.verdicts()
            .into_iter()
            .filter(|verdict| verdict.met.is_none())
            .map(|verdict| verdict.what)
            .collect()
    }

    /// Returns every documented target.
    pub fn verdicts(&self) -> Vec<Verdict> {
        verdicts(&self.rows, self.link_gbs).into_iter().chain(steps::verdicts(self.step_rows())).collect()
    }

    pub(super) fn step_rows(&self) -> &[StepRow] {
        self.steps.as_ref().map_or(&[], |(rows, _)| rows)
    }

    /// Formats the steps as tables; empty without steps.
    pub(super) fn steps_text(&self, screen: Screen) -> String {
        let Some((rows, around)) = &self.steps else { return String::new() };
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        steps::text(rows, around, processors, screen)
    }
}
