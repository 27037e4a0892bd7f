//! Findings and the report of `ryz doctor`.

use std::fmt::Write as _;

use ryzanstein_orchestrator::table::{self, Cell, Column, Layout, Screen, Tone, wrap};
use ryzanstein_process_group::nvml::{Gpu, Pair, PeerAccess};
use serde::Serialize;

/// The severity of a finding, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The expected state.
    Ok,
    /// Worth knowing, not a fault.
    Info,
    /// Jobs run slower, or some jobs fail.
    Warning,
    /// Jobs that need this fail.
    Broken,
}

impl Status {
    const fn name(self) -> (&'static str, Tone) {
        match self {
            Self::Ok => ("ok", Tone::Good),
            Self::Info => ("info", Tone::Plain),
            Self::Warning => ("warning", Tone::Warning),
            Self::Broken => ("BROKEN", Tone::Bad),
        }
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The part of the machine: `host`, `network`, `gpu`, `libraries`, `nccl`, `environment` or `job`.
    pub area: &'static str,
    /// The subject of the check; the name is stable between versions.
    pub name: &'static str,
    /// The subject of the check, if there are several: a GPU, a variable.
    pub subject: Option<String>,
    /// Severity of the finding.
    pub status: Status,
    /// The observation.
    pub seen: String,
    /// The cause or the consequence.
    pub cause: Option<String>,
    /// The remedy.
    pub remedy: Option<String>,
}

impl Finding {
    pub(super) fn new(
        area: &'static str,
        name: &'static str,
        status: Status,
        seen: impl Into<String>,
    ) -> Self {
        Self { area, name, subject: None, status, seen: seen.into(), cause: None, remedy: None }
    }

    pub(super) fn because(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    pub(super) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    pub(super) fn of(mut self, subject: impl Into<String>) -> Self {
        self.subject = Some(subject.into());
        self
    }

    fn title(&self) -> String {
        self.subject.as_ref().map_or(self.name.into(), |subject| format!("{} {subject}", self.name))
    }
}

/// All findings of one examination.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The most severe status of the findings: `ok`, `warning` or `broken`; `info` counts as `ok`.
    pub status: Status,
    /// The version of this program.
    pub version: &'static str,
    /// The host examined.
    pub host: String,
    /// All findings, in the order of the areas.
    pub findings: Vec<Finding>,
    /// The GPUs of the host, from the driver.
    pub gpus: Vec<Gpu>,
    /// The connection of each pair of GPUs.
    pub pairs: Vec<Pair>,
}

impl Report {
    /// Creates a report of these findings.
    pub fn new(host: String, findings: Vec<Finding>, gpus: Vec<Gpu>, pairs: Vec<Pair>) -> Self {
        let worst = findings.iter().map(|finding| finding.status).max().unwrap_or(Status::Ok);
        let status = if worst == Status::Info { Status::Ok } else { worst };
        Self { status, version: ryzanstein_orchestrator::VERSION, host, findings, gpus, pairs }
    }

    /// Adds findings to the report.
    #[must_use]
    pub fn and(mut self, findings: Vec<Finding>) -> Self {
        self.findings.extend(findings);
        Self::new(self.host, self.findings, self.gpus, self.pairs)
    }

    /// Returns 0 when healthy, 1 with warnings, 2 when something is broken.
    pub const fn exit_code(&self) -> i32 {
        match self.status {
            Status::Ok | Status::Info => 0,
            Status::Warning => 1,
            Status::Broken => 2,
        }
    }

    /// Formats the report for people.
    pub fn table(&self, screen: Screen) -> String {
        let count = |status| self.findings.iter().filter(|finding| finding.status == status).count();
        let verdict = match self.status {
            Status::Ok | Status::Info => screen.paint(Tone::Good, "healthy"),
            _ => {
                let warnings = ryzanstein_orchestrator::plural(count(Status::Warning), "warning");
                format!("{} broken, {warnings}", count(Status::Broken))
            }
        };
        let columns =
            [Column::left("area"), Column::left("status"), Column::left("what"), Column::left("seen")];
        let width = |head: &str, texts: &mut dyn Iterator<Item = String>| {
            texts.map(|text| text.chars().count()).max().unwrap_or(0).max(head.len())
        };
        let all = || self.findings.iter();
        let widths = [
            width("area", &mut all().map(|finding| finding.area.into())),
            width("status", &mut all().map(|finding| finding.status.name().0.into())),
            width("what", &mut all().map(Finding::title)),
        ];
        let layout = Layout::new(
            &columns,
            &[widths[0], widths[1], widths[2], usize::MAX / 2],
            Screen { width: None, ..screen },
        );
        // Observations have a separate column, whatever their number of lines; explanations are below it.
        let before: usize = widths.iter().map(|width| width + 2).sum();
        let mut out = format!("ryz {} on {}: {verdict}\n\n{}", self.version, self.host, layout.head());
        for finding in &self.findings {
            let (status, tone) = finding.status.name();
            let cells = [
                finding.area.into(),
                Cell::new(status, tone),
                finding.title().into(),
                Cell::from(wrap(&finding.seen, before, screen)),
            ];
            out += &layout.row(&cells);
            // A good result needs no explanation.
            if finding.status > Status::Ok {
                for (label, text) in [("cause", &finding.cause), ("remedy", &finding.remedy)] {
                    if let Some(text) = text {
                        let _ = writeln!(out, "{:6}{}", "", wrap(&format!("{label}: {text}"), 8, screen));
                    }
                }
            }
        }
        if self.gpus.len() > 1 {
            let _ = writeln!(out, "\nFrom GPU to GPU (* without peer access):\n{}", self.matrix(screen));
        }
        out
    }

    /// Formats the path from each GPU to each other.
    fn matrix(&self, screen: Screen) -> String {
        let names: Vec<String> = self.gpus.iter().map(|gpu| format!("GPU{}", gpu.index)).collect();
        let columns: Vec<Column<'_>> =
            std::iter::once(Column::left("")).chain(names.iter().map(|name| Column::right(name))).collect();
        let rows: Vec<Vec<Cell>> = self
            .gpus
            .iter()
            .zip(&names)
            .map(|(from, name)| {
                let cells = self.gpus.iter().map(|to| self.path_label(from.index, to.index).into());
                std::iter::once(name.as_str().into()).chain(cells).collect()
            })
            .collect();
        table::table(&columns, &rows, screen)
    }

    fn path_label(&self, from: u32, to: u32) -> String {
        if from == to {
            return "-".into();
        }
        let pair = self.pairs.iter().find(|pair| (pair.a, pair.b) == (from.min(to), from.max(to)));
        pair.map_or("?".into(), |pair| {
            let mark = if pair.peer_access == PeerAccess::Yes { "" } else { "*" };
            pair.path.short() + mark
        })
    }
}
