//! `ryz bench`

mod args;
mod out;
mod progress;
mod suite;
mod vary;

use crate::doctor;
use anyhow::bail;
use ryzanstein_benches::suite::{self as bench, Columns, Event, Format, Report, Request, RowWriter};
use ryzanstein_config::{BackendChoice, WorldSize};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::VERSION;
use ryzanstein_orchestrator::plural;
use ryzanstein_orchestrator::table::wrap;
use ryzanstein_process_group::{BackendKind, Error, Memory, units};

pub(crate) use args::Args;
use progress::Progress;
use suite::Suite;

use crate::command::launch;
use crate::command::rank;
use crate::command::screen;
use crate::command::settings;

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let mut config = args.config()?;
    screen.set_log_level(&mut config);
    let request = args.request()?;
    // Refuse wrong requests before anything is started.
    request.check()?;
    args.check_flags()?;
    args.suite().check(request.iterations, config.job.world_size.map(WorldSize::get))?;
    if config.process_group.backend == BackendChoice::Tcp {
        bench::check_graph_support(request.graph, BackendKind::Tcp)?;
    }
    let is_launched = settings::is_launched(&config)?;
    if args.variants().is_some() && is_launched && args.variant.is_none() {
        return Err(Error::Configuration(
            "--vary starts the ranks of each variant itself, on this machine; run it without a launcher, with -n N".into(),
        )
        .into());
    }
    if !is_launched {
        let ranks = config.job.world_size.map(WorldSize::get).ok_or_else(|| {
            Error::Configuration("world size is not set: pass --world-size N or set job.world_size".into())
        })?;
        if let Some(file) = &args.out {
            out::check(file)?;
        }
        if let Some(vary) = args.variants() {
            return vary::run(args, vary, &config, ranks, screen);
        }
        if ranks > 1 {
            return launch::relaunch(ranks, &args.file, &[], &[]);
        }
    }
    rank::run(&config, |orchestrator| measure(orchestrator, args, request, screen))
}

fn measure(
    orchestrator: &mut Orchestrator,
    args: &Args,
    request: Request,
    screen: &screen::Args,
) -> anyhow::Result<()> {
    let suite = args.suite();
    if suite == Suite::Overlap {
        return suite::measure_overlap(orchestrator, request.iterations, args.format, screen);
    }
    let is_first = orchestrator.manager().rank().0 == 0;
    let out = args.out.as_ref().filter(|_| is_first && args.rows.is_none());
    out.map(|file| out::check(file)).transpose()?;
    let rows_file = args.rows.as_deref().filter(|_| is_first);
    let group = orchestrator.manager().world();
    // The targets are not for variants.
    let is_usual = request.part.is_none();
    let is_judged = is_usual && (request.judged || group.memory() != Memory::Host);
    let request = Request { judged: is_judged, ..request };
    let request = suite.place(request, group.memory());
    let operations: Vec<String> =
        request.ops.iter().map(|form| bench::label(*form, request.reduction)).collect();
    // With --out, the file gets the requested format, and standard output the table.
    let shown = if args.out.is_some() { Format::Table } else { args.format };
    // The process that compares variants shows them.
    let is_quiet = request.part.is_some();
    let stdout = screen.stdout();
    let link_gbs = bench::prepare(orchestrator, &request)?;
    let columns = Columns { judged: request.judged, expected: link_gbs.is_some() };
    let paths = orchestrator.manager().world().paths();
    let writer = RowWriter::new(&operations, request.dtype, &paths, columns, stdout);
    let heading = heading(orchestrator, &request, link_gbs);
    let head = match shown {
        Format::Table => {
            let lines: Vec<String> = heading.lines().map(|line| wrap(line, 2, stdout)).collect();
            format!("{}\n\n{}", lines.join("\n"), writer.head())
        }
        Format::Csv => format!("{}\n", bench::csv_head()),
        Format::Json | Format::Html => String::new(),
    };
    let is_live = shown == Format::Table && !is_quiet && screen::is_terminal();
    let part = request.part.as_ref();
    let part = part.map(|part| format!("{}, round {} of {}: ", part.variant, part.round, bench::ROUNDS));
    let progress = Progress::new(is_first && !is_live, &part.unwrap_or_default());
    // A reader of the output gets each row as soon as it is measured.
    let tell = |text: &str| {
        if is_first && !is_quiet {
            screen::print(text);
        }
    };
    tell(&head);
    let rows = bench::run(orchestrator, &request, link_gbs, |event| {
        match event {
            Event::Next { number, of, op, bytes } => progress.tell(number, of, op, bytes),
            Event::Absent { variant, why } if is_first => {
                progress.aside(|| screen::print_aside(&format!("ryz: {variant} is left out: {why}\n")));
            }
            Event::Absent { .. } => {}
            Event::Row(row) => {
                if let Some(file) = rows_file {
                    out::add(file, row)?;
                }
                progress.aside(|| {
                    tell(&match shown {
                        Format::Table => writer.row(row),
                        Format::Json => bench::json(row) + "\n",
                        Format::Csv => bench::csv_row(row) + "\n",
                        // A page comes at the end.
                        Format::Html => String::new(),
                    });
                });
            }
        }
        anyhow::Ok(())
    })?;
    progress.end();
    let steps = suite.measure_steps(orchestrator, request.iterations, link_gbs, |row| {
        if shown == Format::Json {
            tell(&(bench::steps::json(row) + "\n"));
        }
    })?;
    let report = Report { heading, judged: request.judged, rows, link_gbs, steps };
    match shown {
        Format::Table => tell(&format!("\n{}", report.conclusion(stdout))),
        Format::Html => tell(&report.text(shown)),
        // There is no room for the verdicts on standard output.
        Format::Json | Format::Csv if is_first => screen::print_aside(&report.targets(screen.stderr())),
        Format::Json | Format::Csv => {}
    }
    if let Some(file) = out {
        out::write(file, &report.text(args.format))?;
    }
    if !report.is_correct() {
        bail!("the benchmark found wrong values");
    }
    if args.strict {
        let missed = report.missed_targets();
        if !missed.is_empty() {
            bail!("--strict: missed: {}", missed.join(", "));
        }
        let unmeasured = report.unmeasured_targets();
        if !unmeasured.is_empty() {
            bail!("--strict: not measured: {}; --latency-targets measures all", unmeasured.join(", "));
        }
    }
    Ok(())
}

fn heading(orchestrator: &mut Orchestrator, request: &Request, link_gbs: Option<f64>) -> String {
    let manager = orchestrator.manager();
    let hosts: std::collections::BTreeSet<&str> =
        manager.roster().members.iter().map(|member| member.host.as_str()).collect();
    let probed = link_gbs.map_or_else(String::new, |gbs| format!("\nprobed: one link carries {gbs:.2} GB/s"));
    let busy = doctor::busy().map_or_else(String::new, |told| format!("\n{told}"));
    format!(
        "ryz {VERSION}: {} on {}, ready in {}\n{}{busy}\nbackend {}: {}\n{} elements, {}{probed}",
        plural(manager.roster().world_size(), "rank"),
        plural(hosts.len(), "host"),
        units::time(manager.init_time().as_secs_f64() * 1e6),
        doctor::machine(),
        manager.backend(),
        manager.backend_summary(),
        request.dtype,
        if request.graph {
            "replayed from a CUDA graph; results at the end of each replay are checked; latency per call of the slowest rank"
        } else {
            "every value of every call is checked; latency of the slowest rank"
        },
    )
}
