//! The share of a model's steps that its collectives take, by operation, and advice where that share is large. Pure.
//!
//! The figures are those of [profiles](ryzanstein_process_group::Profile). A wait for a late rank is not communication: it is
//! reported separately, as far as one rank can observe it, and relative to the rank that waits least. On GPUs only some calls
//! are timed, by events; they represent the others of their kind.

mod advice;

use std::fmt::Write as _;

use ryzanstein_process_group::{ProcessGroup, ProcessGroupManager, ProfileRow, bus_factor, units};
use serde::{Deserialize, Serialize};

use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table, wrap};

pub use advice::{Advice, JobContext, Limit};

/// The documented limit: communication takes less than this share of a step.
pub const BELOW_SHARE: f64 = 0.2;
/// The share from which on advice is given.
const ADVISED_FROM: f64 = 0.3;

/// The calls of one operation.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Part {
    /// Name of the operation.
    pub op: String,
    /// Number of calls in a step.
    pub calls: f64,
    /// Mean bytes of a call, for the whole array.
    pub bytes: f64,
    /// Mean microseconds of a call, without waits; `None` if no call was timed.
    pub call_us: Option<f64>,
    /// Mean microseconds that a call waits for late ranks; `None` if no call was timed.
    pub wait_us: Option<f64>,
    /// The share of a step that all calls of the operation take, without waits; `None` if no call was timed.
    pub share: Option<f64>,
    /// Name of the element type of the largest calls.
    pub dtype: String,
    /// Mean bytes that a link carries for a call: `bytes` × the operation's traffic factor.
    pub wire_bytes: f64,
}

/// The communication of a step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Communication {
    /// The parts by operation, the most expensive first.
    pub parts: Vec<Part>,
}

impl Communication {
    /// Builds it from the profile of one rank, which was cleared before `steps` steps that took `seconds` together. Calls of a
    /// single rank do not count.
    pub fn new(rows: &[ProfileRow], seconds: f64, steps: usize) -> Self {
        let rows: Vec<&ProfileRow> = rows.iter().filter(|row| row.world_size > 1).collect();
        let mut ops: Vec<&str> = rows.iter().map(|row| row.op).collect();
        ops.sort_unstable();
        ops.dedup();
        Self { parts: ops.into_iter().map(|op| Part::new(op, &rows, seconds, steps)).collect() }.sorted()
    }

    /// Combines all ranks: each operation's calls as on the rank that waits least. The additional time of the others is a wait.
    pub fn of_ranks(ranks: &[Self]) -> Self {
        let mut ops: Vec<&str> =
            ranks.iter().flat_map(|rank| &rank.parts).map(|part| part.op.as_str()).collect();
        ops.sort_unstable();
        ops.dedup();
        let parts = ops.into_iter().filter_map(|op| {
            let all: Vec<&Part> =
                ranks.iter().filter_map(|rank| rank.parts.iter().find(|part| part.op == op)).collect();
            let part = (*all.first()?).clone();
            let calls: Option<Vec<f64>> = all.iter().map(|part| part.call_us).collect();
            let Some(calls) = calls else {
                return Some(Part { call_us: None, wait_us: None, share: None, ..part });
            };
            let least = calls.iter().copied().fold(f64::INFINITY, f64::min);
            let known: f64 = all.iter().filter_map(|part| part.wait_us).sum();
            let waits = calls.iter().map(|call| call - least).sum::<f64>() + known;
            let share = part.share.zip(part.call_us);
            let share = share.map(|(share, call)| if call > 0.0 { share * least / call } else { share });
            Some(Part { call_us: Some(least), wait_us: Some(waits / all.len() as f64), share, ..part })
        });
        Self { parts: parts.collect() }.sorted()
    }

    /// Sorts the operations, the most expensive first.
    fn sorted(mut self) -> Self {
        self.parts.sort_by(|a, b| b.share.unwrap_or(0.0).total_cmp(&a.share.unwrap_or(0.0)));
        self
    }

    /// Returns the share of a step that all calls take; `None` without calls, or if an operation was not timed.
    pub fn share(&self) -> Option<f64> {
        let shares: Option<Vec<f64>> = self.parts.iter().map(|part| part.share).collect();
        shares.filter(|shares| !shares.is_empty()).map(|shares| shares.iter().sum())
    }

    /// Returns true if the share is below the documented limit; `None` if it is not known.
    pub fn meets_target(&self) -> Option<bool> {
        self.share().map(|share| share < BELOW_SHARE)
    }

    /// Formats a table by operation, the verdict and advice for people. Empty without timed calls.
    pub fn text(&self, context: &JobContext, screen: Screen) -> String {
        if self.parts.iter().all(|part| part.share.is_none()) {
            return String::new();
        }
        let rows: Vec<Vec<Cell>> = self.parts.iter().map(|part| part.cells().into()).collect();
        let by_operation = table(&Part::COLUMNS, &rows, screen);
        let Some(share) = self.share() else {
            return by_operation + "communication: not measured, as some operations were not timed\n";
        };
        let is_met = share < BELOW_SHARE;
        let verdict = format!(
            "communication: {} of a step (target < {:.0} %): {}",
            percent(share),
            BELOW_SHARE * 100.0,
            if is_met { "met" } else { "missed" }
        );
        let tone = if is_met { Tone::Good } else { Tone::Warning };
        let mut text = format!("{by_operation}{}\n", screen.paint(tone, &verdict));
        for line in self.advice(context).into_iter().flat_map(Advice::lines) {
            let _ = writeln!(text, "{}", wrap(&line, 2, screen));
        }
        text
    }
}

impl Part {
    /// The columns of [`cells`](Self::cells).
    pub(crate) const COLUMNS: [Column<'static>; 6] = [
        Column::left("operation"),
        Column::right("calls/step"),
        Column::right("bytes"),
        Column::right("a call").drop_priority(1),
        Column::right("wait").drop_priority(2),
        Column::right("of a step"),
    ];

    fn new(op: &str, rows: &[&ProfileRow], seconds: f64, steps: usize) -> Self {
        let rows = || rows.iter().copied().filter(|row| row.op == op);
        let calls = rows().map(|row| row.calls).sum::<u64>() as f64;
        let sum = |of: &dyn Fn(&ProfileRow) -> f64| rows().map(|row| row.calls as f64 * of(row)).sum::<f64>();
        // The timed calls represent all of their row.
        let is_timed = calls > 0.0 && rows().all(|row| row.timed > 0);
        let mean = |of: fn(&ProfileRow) -> f64| is_timed.then(|| sum(&|row| of(row) / row.timed as f64));
        let taken = mean(|row| row.total_s - row.waited_s);
        let waited = is_timed.then(|| rows().map(|row| row.waited_s).sum::<f64>());
        let largest = rows().max_by(|a, b| a.bytes_mean.total_cmp(&b.bytes_mean));
        Self {
            op: op.to_owned(),
            calls: calls / steps.max(1) as f64,
            bytes: sum(&|row| row.bytes_mean) / calls.max(1.0),
            call_us: taken.map(|taken| taken / calls * 1e6),
            wait_us: waited.map(|waited| waited / calls * 1e6),
            share: taken.map(|taken| taken / seconds),
            dtype: largest.map(|row| row.dtype.to_string()).unwrap_or_default(),
            wire_bytes: sum(&|row| row.bytes_mean * bus_factor(op, row.world_size)) / calls.max(1.0),
        }
    }

    /// Returns the cells of one row.
    pub(crate) fn cells(&self) -> [Cell; 6] {
        let shown = |figure: Option<String>| figure.map_or_else(|| Cell::from("not timed"), Cell::from);
        [
            self.op.as_str().into(),
            short(self.calls).into(),
            units::bytes(self.bytes).into(),
            shown(self.call_us.map(units::time)),
            shown(self.wait_us.map(units::time)),
            shown(self.share.map(percent)),
        ]
    }
}

impl JobContext {
    /// Returns the context of a group of this job. `link_gbs` is the bandwidth of one link in one direction, in 10⁹ bytes per
    /// second, if known; `rows` are a profile, whose rows show the presence of NVLinks.
    pub fn of(
        manager: &mut ProcessGroupManager,
        group: fn(&mut ProcessGroupManager) -> &mut ProcessGroup,
        rows: &[ProfileRow],
        link_gbs: Option<f64>,
    ) -> Self {
        let members = group(manager).members().to_vec();
        let all = &manager.roster().members;
        let mut hosts: Vec<&str> = members.iter().map(|rank| all[rank.index()].host.as_str()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let hosts = hosts.len();
        let linked = rows.iter().find_map(|row| Some((row.busbw_gbs, row.link_share?)));
        let rated = linked.filter(|(_, share)| *share > 0.0).map(|(gbs, share)| gbs / share);
        Self {
            ranks: members.len(),
            sharing_cpus: group(manager).sharing_cpus(),
            hosts,
            on_gpus: group(manager).device().is_some(),
            has_nvlink: linked.is_some(),
            link_gbs: link_gbs.or(rated),
            is_graph: true,
        }
    }
}

/// Formats a measured share for people.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Formats a number of calls, without decimals if it is whole.
fn short(number: f64) -> String {
    if number.fract() < 0.05 { format!("{number:.0}") } else { format!("{number:.1}") }
}

#[cfg(test)]
mod tests;
