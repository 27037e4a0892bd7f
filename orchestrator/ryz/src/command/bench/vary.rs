//! `ryz bench --vary`: runs the variants in turns, each in separate ranks, and shows them side by side.

use std::ffi::OsString;
use std::path::Path;

use crate::doctor;
use anyhow::{Context as _, bail};
use ryzanstein_benches::suite::{Format, ROUNDS, RecordedRow, Variant, Vary, side_by_side};
use ryzanstein_config::{BackendChoice, Config, Source};
use ryzanstein_orchestrator::VERSION;
use ryzanstein_orchestrator::nccl_settings;
use ryzanstein_orchestrator::plural;
use ryzanstein_orchestrator::table::{Screen, wrap};
use ryzanstein_process_group::{BackendKind, Error};

use super::args::Args;
use super::out;
use crate::command::launch;
use crate::command::screen;
use crate::command::settings;

/// The compared property, and the backend.
struct Comparison<'a> {
    args: &'a Args,
    vary: Vary,
    ranks: u32,
    backend: BackendKind,
    variants: Vec<Variant>,
    /// Environment variables of all ranks.
    variables: Vec<(&'static str, &'static str)>,
}

pub(super) fn run(
    args: &Args,
    vary: Vary,
    config: &Config,
    ranks: u32,
    screen: &screen::Args,
) -> anyhow::Result<i32> {
    let comparison = Comparison::new(args, vary, config, ranks)?;
    let temporary = tempfile::NamedTempFile::new().context("cannot make a file for the rows")?;
    let file = temporary.path();
    let is_shown = args.format == Format::Json && args.out.is_none();
    let mut told = 0;
    for round in 1..=ROUNDS {
        for variant in &comparison.variants {
            let code = comparison.measure(variant, round, file)?;
            if code != 0 {
                let told = format!("ryz: --vary {}: {} failed in round {round}\n", vary.name(), variant.name);
                screen::print_aside(&told);
                return Ok(code);
            }
            if is_shown {
                let text = std::fs::read_to_string(file).context("cannot read the rows")?;
                screen::print(&text[told..]);
                told = text.len();
            }
        }
    }
    let rows = out::rows(file)?;
    if rows.is_empty() {
        bail!("--vary {}: no variant has a path for any of the operations", vary.name());
    }
    if is_shown {
        // There is no room for the table on standard output.
        screen::print_aside(&comparison.table(&rows, screen.stderr()));
    } else {
        screen::print(&comparison.table(&rows, screen.stdout()));
    }
    match (&args.out, args.format) {
        (Some(to), Format::Json) => {
            out::write(to, &std::fs::read_to_string(file).context("cannot read the rows")?)?;
        }
        (Some(to), _) => out::write(to, &comparison.table(&rows, Screen::PLAIN))?,
        (None, _) => {}
    }
    Ok(0)
}

impl<'a> Comparison<'a> {
    /// Refuses comparisons that are impossible.
    fn new(args: &'a Args, vary: Vary, config: &Config, ranks: u32) -> Result<Self, Error> {
        let refused = |told: String| Err(Error::Configuration(format!("--vary {}: {told}", vary.name())));
        if args.path != ["auto"] {
            return refused("the variants choose the paths; omit --path".into());
        }
        if vary == Vary::Start && args.graph {
            return refused("a call that starts a group cannot be in a graph; omit --graph".into());
        }
        if vary == Vary::Backend && args.backend.is_some() {
            return refused("the variants choose the backend; omit --backend".into());
        }
        let environment = settings::environment();
        let gpus = || settings::visible_gpus(config) as usize;
        let wanted = config.process_group.backend;
        let (backend, gpus) = match (wanted, vary) {
            (BackendChoice::Nccl, _) => (BackendKind::Nccl, gpus()),
            (BackendChoice::Auto, _) | (_, Vary::Backend) => {
                let gpus = gpus();
                let is_enough = gpus >= ranks as usize;
                (if is_enough { BackendKind::Nccl } else { BackendKind::Tcp }, gpus)
            }
            _ => (BackendKind::Tcp, 0),
        };
        let variants = vary.variants(backend, ranks as usize, gpus)?;
        let of_nccl = nccl_settings::user_variables(&environment);
        let required = nccl_settings::missing(config, &environment);
        vary.check_unset(&variants, |name| {
            if environment.contains_key(name) {
                return Some("the environment".into());
            }
            if let Some(own) = of_nccl.iter().find(|own| own.name == name) {
                return own.file.as_ref().map(|file| file.display().to_string());
            }
            required.iter().any(|(of, _)| of == name).then(|| "the section [nccl] of the settings".into())
        })?;
        let mut variables = Vec::new();
        if vary != Vary::Backend {
            // As detected, so that all variants use the same.
            variables.push(("RYZ_PROCESS_GROUP__BACKEND", backend.name()));
        }
        if config.source_of("log.level") == Some(Source::Default) {
            // The logs of this many starts would fill the screen.
            variables.push(("RYZ_LOG__LEVEL", "warn"));
        }
        Ok(Self { args, vary, ranks, backend, variants, variables })
    }

    /// Runs the ranks of a variant, which add their rows to the file.
    fn measure(&self, variant: &Variant, round: usize, file: &Path) -> anyhow::Result<i32> {
        let round = round.to_string();
        let mut more: Vec<OsString> =
            ["--variant", variant.name, "--round", &round, "--rows"].map(Into::into).into();
        more.push(file.into());
        if let Some(path) = variant.path {
            more.extend(["--path", path].map(OsString::from));
        }
        let variables = [&self.variables, variant.variables].concat();
        launch::relaunch(self.ranks, &self.args.file, &more, &variables)
    }

    fn table(&self, rows: &[RecordedRow], screen: Screen) -> String {
        let backend = match self.vary {
            Vary::Backend => String::new(),
            _ => format!(", backend {}", self.backend),
        };
        let first = self.variants.first().map_or("", |first| first.name);
        let mut lines = vec![
            format!("ryz {VERSION}: {}{backend}", plural(self.ranks as usize, "rank")),
            doctor::machine(),
            format!(
                "{} elements, every value of every call is checked; latency of the slowest rank, median of {ROUNDS} rounds in \
                 which the variants take turns; ratio to {first}",
                self.args.dtype
            ),
        ];
        lines.extend(self.variants.iter().map(Variant::legend));
        let lines: Vec<String> = lines.iter().map(|line| wrap(line, 2, screen)).collect();
        format!("{}\n\n{}", lines.join("\n"), side_by_side(rows, &self.variants, screen))
    }
}
