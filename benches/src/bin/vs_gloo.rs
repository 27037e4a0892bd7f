//! Our all-reduce over TCP compared with Gloo's: processes of both, alternating on this machine, by the same method.
//!
//! `vs_gloo --python PYTHON [--world-sizes 2,4] [--rounds 3] [--sizes 1024,…] [--json FILE]` needs a built `ryz` in the folder of this
//! program and a Python with torch and numpy. Each round runs every size with each of the two; a figure is the median over the rounds.
//! `vs_gloo rank SIZES` is what each of our ranks runs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use ryzanstein_benches::measure::{Row, SIZES, measure};
use ryzanstein_benches::ranks;
use ryzanstein_orchestrator::table;
use ryzanstein_process_group::units;
use serde::Serialize;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, sizes] = &arguments[..]
        && first == "rank"
    {
        return rank(&ranks::numbers(sizes)?);
    }
    let mut options =
        Options { python: None, world_sizes: vec![2, 4], rounds: 3, sizes: SIZES.to_vec(), json: None };
    for pair in arguments.chunks(2) {
        let [flag, value] = pair else { bail!("{} needs a value", pair[0]) };
        match flag.as_str() {
            "--python" => options.python = Some(value.into()),
            "--world-sizes" => options.world_sizes = ranks::numbers(value)?,
            "--rounds" => options.rounds = value.parse().context("--rounds")?,
            "--sizes" => options.sizes = ranks::numbers(value)?,
            "--json" => options.json = Some(value.into()),
            _ => bail!("unknown flag {flag}; see the top of this file"),
        }
    }
    compare(&options)
}

struct Options {
    python: Option<PathBuf>,
    world_sizes: Vec<usize>,
    rounds: usize,
    sizes: Vec<usize>,
    json: Option<PathBuf>,
}

/// One of our ranks, under `ryz launch`.
fn rank(sizes: &[usize]) -> Result<()> {
    let mut orchestrator = ranks::initialize()?;
    for &size in sizes {
        let row = measure(orchestrator.manager().world(), size)?;
        if orchestrator.manager().rank().0 == 0 {
            println!("{}", serde_json::to_string(&row)?);
        }
    }
    Ok(orchestrator.finalize()?)
}

/// One size and world size, both sides.
#[derive(Serialize)]
struct Pair {
    world_size: usize,
    bytes: usize,
    ours_us: f64,
    gloo_us: f64,
    ours_back_to_back_us: f64,
    gloo_back_to_back_us: f64,
    ours_broadcast_us: f64,
    gloo_broadcast_us: f64,
}

fn compare(options: &Options) -> Result<()> {
    let python = options.python.as_ref().context("pass --python: a Python that has torch and numpy")?;
    let sizes: Vec<String> = options.sizes.iter().map(ToString::to_string).collect();
    let mut pairs = Vec::new();
    for &world_size in &options.world_sizes {
        let (mut ours, mut gloo) = (Vec::new(), Vec::new());
        for round in 0..options.rounds {
            eprintln!("world size {world_size}, round {} of {}", round + 1, options.rounds);
            ours.push(run(&mut our_command(world_size, &sizes)?)?);
            gloo.push(run(&mut gloo_command(python, world_size, &sizes))?);
        }
        for (index, &bytes) in options.sizes.iter().enumerate() {
            let median = |rounds: &[Vec<Row>], figure: fn(&Row) -> f64| {
                let mut all: Vec<f64> = rounds.iter().map(|rows| figure(&rows[index])).collect();
                all.sort_by(f64::total_cmp);
                all[all.len() / 2]
            };
            pairs.push(Pair {
                world_size,
                bytes,
                ours_us: median(&ours, |r| r.median_us),
                gloo_us: median(&gloo, |r| r.median_us),
                ours_back_to_back_us: median(&ours, |r| r.back_to_back_us),
                gloo_back_to_back_us: median(&gloo, |r| r.back_to_back_us),
                ours_broadcast_us: median(&ours, |r| r.broadcast_us),
                gloo_broadcast_us: median(&gloo, |r| r.broadcast_us),
            });
        }
    }
    print(&pairs);
    if let Some(file) = &options.json {
        let lines: Result<Vec<String>, _> = pairs.iter().map(serde_json::to_string).collect();
        std::fs::write(file, lines?.join("\n") + "\n").with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn our_command(world_size: usize, sizes: &[String]) -> Result<Command> {
    let mut command = ranks::command(world_size, "tcp")?;
    command.arg(sizes.join(","));
    Ok(command)
}

fn gloo_command(python: &Path, world_size: usize, sizes: &[String]) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/gloo.py");
    let mut command = Command::new(python);
    command.arg(script).arg(world_size.to_string()).args(sizes);
    command
}

/// Runs one side and reads its JSON lines. Other text before or between them is ignored.
fn run(command: &mut Command) -> Result<Vec<Row>> {
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?} ended with {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter_map(|line| line.find('{').map(|at| &line[at..]));
    let rows: Vec<Row> = lines.filter_map(|line| serde_json::from_str(line).ok()).collect();
    ensure!(!rows.is_empty(), "{command:?} printed no figures: {text}");
    ensure!(rows.iter().all(|r| r.errors == 0), "{command:?} got wrong values: {text}");
    Ok(rows)
}

fn print(pairs: &[Pair]) {
    let head = [
        "ranks",
        "bytes",
        "ours",
        "gloo",
        "gloo/ours",
        "ours b2b",
        "gloo b2b",
        "gloo/ours",
        "ours bcast",
        "gloo bcast",
        "gloo/ours",
    ];
    let rows: Vec<Vec<String>> = pairs
        .iter()
        .map(|p| {
            let ratio = |ours: f64, gloo: f64| format!("{:.2}", gloo / ours);
            vec![
                p.world_size.to_string(),
                p.bytes.to_string(),
                units::time(p.ours_us),
                units::time(p.gloo_us),
                ratio(p.ours_us, p.gloo_us),
                units::time(p.ours_back_to_back_us),
                units::time(p.gloo_back_to_back_us),
                ratio(p.ours_back_to_back_us, p.gloo_back_to_back_us),
                units::time(p.ours_broadcast_us),
                units::time(p.gloo_broadcast_us),
                ratio(p.ours_broadcast_us, p.gloo_broadcast_us),
            ]
        })
        .collect();
    print!("{}", table::columns(&head, 0, &rows));
}
