//! `ryz tune`

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::doctor;
use crate::output_file;
use crate::tune::{self, Request, Tuned};
use ryzanstein_benches::measure::{Collective, UnknownCollective};
use ryzanstein_benches::suite::Sweep;
use ryzanstein_config::{Config, TuningChoice, WorldSize, file};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::plural;
use ryzanstein_orchestrator::table::{Screen, wrap};
use ryzanstein_process_group::device::LibrarySearch;
use ryzanstein_process_group::paths::tuned::TuningTable;
use ryzanstein_process_group::{Error, tuning};

use crate::command::launch;
use crate::command::rank;
use crate::command::screen;
use crate::command::settings;
pub(crate) use crate::command::tune_args::Args;
use crate::command::tune_nccl;

impl Args {
    fn config(&self) -> anyhow::Result<Config> {
        let mut flags = settings::Flags::new();
        settings::set_flag(&mut flags, "job.world_size", "--world-size", self.world_size.as_ref());
        settings::set_flag(&mut flags, "process_group.backend", "--backend", self.backend.as_ref());
        let mut config = self.file.load(flags)?;
        settings::silence_slow_call_warnings(&mut config);
        // The comparison is with the built-in table.
        config.process_group.tuning = TuningChoice::Off;
        Ok(config)
    }

    fn request(&self) -> Result<Request, Error> {
        let date = chrono::Utc::now().format("%Y-%m-%d").to_string();
        Ok(Request { ops: operations(&self.op)?, sizes: self.sizes()?, date })
    }

    fn sizes(&self) -> Result<Vec<u64>, Error> {
        let Some(sizes) = &self.sizes else {
            return Sweep { min: 1000, max: 16_000_000, factor: 4 }.sizes();
        };
        let mut sizes: Vec<u64> = sizes.iter().map(|size| size.get()).collect();
        sizes.sort_unstable();
        sizes.dedup();
        Ok(sizes)
    }

    fn writes(&self) -> bool {
        self.apply || self.out.is_some()
    }

    /// Returns the path of the table, whether it is written or not.
    fn target(&self) -> Result<PathBuf, Error> {
        if let Some(out) = &self.out {
            if out.is_dir() {
                return Err(Error::Configuration(format!(
                    "--out {}: it is a folder; name a file in it",
                    out.display()
                )));
            }
            return Ok(out.clone());
        }
        let environment = settings::environment();
        let state = LibrarySearch::from_variables(|name| environment.get(name).cloned()).state;
        state.map(|state| tuning::user_file(&state)).ok_or_else(|| {
            Error::Configuration(
                "there is no folder for the table: neither XDG_STATE_HOME nor HOME is set; set one, or name a file with --out".into(),
            )
        })
    }
}

fn operations(text: &str) -> Result<Vec<Collective>, Error> {
    if text == "all" {
        return Ok(Request::operations());
    }
    let names: Vec<&str> = Request::operations().into_iter().map(Collective::name).collect();
    let names = names.join(", ");
    let parse = |name: &str| {
        let what: Collective = name
            .trim()
            .parse()
            .map_err(|error: UnknownCollective| Error::Configuration(format!("--op {text}: {error}")))?;
        if Request::operations().contains(&what) {
            return Ok(what);
        }
        Err(Error::Configuration(format!("--op {text}: {what} has one path only; expected some of {names}")))
    };
    text.split(',').map(parse).collect()
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    if args.nccl {
        return tune_nccl::run(args, screen);
    }
    let mut config = args.config()?;
    screen.set_log_level(&mut config);
    let request = args.request()?;
    request.check()?;
    let target = args.target()?;
    if !settings::is_launched(&config)? {
        let ranks = config.job.world_size.map_or(0, WorldSize::get);
        if ranks < 2 {
            return Err(Error::Configuration(
                "paths are measured between ranks: pass --world-size N with 2 or more, or use --nccl for settings of NCCL".into(),
            )
            .into());
        }
        if args.writes() {
            output_file::prepare(&target)?;
        }
        return launch::relaunch(ranks, &args.file, &[], &[]);
    }
    rank::run(&config, |orchestrator| {
        let is_first = orchestrator.manager().rank().0 == 0;
        if is_first && args.writes() {
            output_file::prepare(&target)?;
        }
        let tuned = measure(orchestrator, &request, is_first, screen.stderr())?;
        if is_first {
            finish(args, &request, &tuned, &target, screen)?;
        }
        Ok(())
    })
}

fn measure(
    orchestrator: &mut Orchestrator,
    request: &Request,
    is_first: bool,
    screen: Screen,
) -> Result<Tuned, Error> {
    if let Some(told) = doctor::busy().filter(|_| is_first) {
        screen::print_aside(&(wrap(&format!("ryz: {told}"), 2, screen) + "\n"));
    }
    tune::run(orchestrator, request, &mut |step| {
        if is_first {
            screen::print_aside(&format!("{step}\n"));
        }
    })
}

/// Writes the table, if that was requested, and reports it.
fn finish(
    args: &Args,
    request: &Request,
    tuned: &Tuned,
    target: &Path,
    screen: &screen::Args,
) -> anyhow::Result<()> {
    let machine = tuning::machine();
    let shown = target.display();
    let found = file::read_text(target, tuning::LARGEST_FILE)
        .map_err(|error| (error.is_not_found(), error.to_string()));
    let found = found
        .and_then(|text| TuningTable::parse(&text, &machine).map_err(|error| (false, error.to_string())));
    let (mut table, unfit) = match found {
        Ok(table) => (table, None),
        Err((is_missing, why)) => (TuningTable::new(machine), Some(why).filter(|_| !is_missing)),
    };
    let names: Vec<&str> = request.ops.iter().map(|what| what.name()).collect();
    let old = table.replace(tuned.world_size, tuned.on_gpus, &names, tuned.ranges.clone());
    let is_written = args.writes();
    if is_written {
        output_file::store(target, &table.json())?;
    }
    let json = tune::json(tuned, is_written.then(|| shown.to_string()).as_deref());
    screen.show(args.format, &json, |screen| {
        let mut text = tune::table(tuned, &old, screen);
        if let Some(why) = unfit {
            let replaced = if is_written { "was" } else { "would be" };
            let _ = writeln!(text, "{shown} {replaced} replaced: {why}");
        }
        text + &match (is_written, args.apply) {
            (true, true) if tuned.ranges.is_empty() => format!(
                "wrote {shown}: no path beats the built-in ones for {}\n",
                plural(tuned.world_size, "rank")
            ),
            (true, true) => format!(
                "wrote {shown}: {}; jobs with {} on this machine now use it. To undo: rm {shown}\n",
                plural(tuned.ranges.len(), "range"),
                plural(tuned.world_size, "rank")
            ),
            (true, false) => format!("wrote {shown}; to use it: process_group.tuning = \"{shown}\"\n"),
            (false, _) => format!("nothing was written; --apply writes {shown}\n"),
        }
    });
    Ok(())
}
