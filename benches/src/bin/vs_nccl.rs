//! Our collectives on GPUs compared with direct calls of NCCL: in the same processes, alternating, by the same method.
//!
//! `vs_nccl [--world-size 4] [--rounds 3] [--ops all_reduce,…] [--sizes 1024,…] [--json FILE]` needs a built `ryz` in the
//! folder of this program. Every value is checked; a figure is the median over the rounds. The host's time of a call is
//! measured separately, ours and NCCL's in turns within one run, as a processor's speed changes from one run to the next.
//! `vs_nccl rank …` is what each rank runs.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use ryzanstein_benches::host_clock::HostClock;
use ryzanstein_benches::measure::{
    Case, Collective, Figures, Gpu, UnknownCollective, calls_back_to_back, measure, measure_calls,
};
use ryzanstein_benches::ranks;
use ryzanstein_benches::raw_nccl::RawNccl;
use ryzanstein_orchestrator::table;
use ryzanstein_process_group::{ProcessGroup, ReduceOp};
use serde::Serialize;

const SIZES: [usize; 8] = [1024, 8192, 65536, 1 << 20, 10_000_000, 16 << 20, 100_000_000, 256 << 20];
/// Minimum calls per round for the host's time, ours and NCCL's together: host times vary more than GPU times.
const MIN_HOST_CALLS: usize = 24;
/// Number of back-to-back all-reduces.
const IN_A_ROW: usize = 960;

struct Options {
    world_size: usize,
    rounds: usize,
    ops: Vec<Collective>,
    sizes: Vec<usize>,
    json: Option<String>,
}

fn main() -> Result<()> {
    ranks::main_on_gpus(options, |options| options.world_size, rank)
}

fn options(arguments: &[String]) -> Result<Options> {
    let ops = Collective::ALL.into_iter().filter(|what| *what != Collective::Barrier).collect();
    let mut options = Options { world_size: 4, rounds: 3, ops, sizes: SIZES.to_vec(), json: None };
    for pair in arguments.chunks(2) {
        let [flag, value] = pair else { bail!("{} needs a value", pair[0]) };
        match flag.as_str() {
            "--world-size" => options.world_size = value.parse().context("--world-size")?,
            "--rounds" => options.rounds = value.parse().context("--rounds")?,
            "--ops" => {
                let ops: Result<_, UnknownCollective> = value.split(',').map(str::parse).collect();
                options.ops = ops?;
            }
            "--sizes" => {
                let sizes: Result<_, _> = value.split(',').map(str::parse).collect();
                options.sizes = sizes.context("--sizes")?;
            }
            "--json" => options.json = Some(value.into()),
            _ => bail!("unknown flag {flag}; see the top of this file"),
        }
    }
    Ok(options)
}

/// One operation and size. Times are in microseconds.
#[derive(Serialize)]
struct Row {
    op: &'static str,
    bytes: usize,
    world_size: usize,
    ours_graph_us: f64,
    raw_graph_us: f64,
    ours_us: f64,
    raw_us: f64,
    /// Time until the call returned to the host: the median of the rank where the difference is largest.
    ours_host_us: f64,
    raw_host_us: f64,
}

fn rank(options: &Options) -> Result<()> {
    let mut orchestrator = ranks::initialize()?;
    let group = orchestrator.manager().world();
    let raw = RawNccl::new(group)?;
    let mut rows = Vec::new();
    for &what in &options.ops {
        for &bytes in &options.sizes {
            let row = one(group, &raw, what, bytes, options.rounds)?;
            if group.rank().0 == 0 {
                eprintln!("{}", serde_json::to_string(&row)?);
            }
            rows.push(row);
        }
    }
    let row = in_a_row(group, &raw, options.rounds)?;
    if group.rank().0 == 0 {
        print(&rows, &raw, &row);
        if let Some(file) = &options.json {
            let lines: Result<Vec<String>, _> = rows.iter().map(serde_json::to_string).collect();
            std::fs::write(file, lines?.join("\n") + "\n").with_context(|| file.clone())?;
        }
    }
    drop(raw);
    Ok(orchestrator.finalize()?)
}

fn one(
    group: &mut ProcessGroup,
    raw: &RawNccl,
    what: Collective,
    bytes: usize,
    rounds: usize,
) -> Result<Row> {
    let device = group.device().context("no GPU")?.clone();
    let iterations = (1_000_000_000 / bytes.max(1)).clamp(6, 96);
    let case = Case::new(what, bytes, iterations);
    let mut figures: BTreeMap<(bool, bool), Vec<Figures>> = BTreeMap::new();
    let mut host = HostTimes::default();
    for round in 0..rounds {
        host.take(group, raw, &case)?;
        for graph in [true, false] {
            // The order changes from round to round.
            for ours in [round % 2 == 0, round % 2 == 1] {
                let mut bench = Gpu::new(device.clone(), graph);
                let found = if ours {
                    measure(group, &mut bench, &case)?
                } else {
                    measure_calls(group, &mut bench, &case, &mut |_, slot| raw.call(what, slot))?
                };
                ensure!(
                    found.errors == 0,
                    "{what} of {bytes} bytes: {} wrong elements (ours: {ours})",
                    found.errors
                );
                figures.entry((ours, graph)).or_default().push(found);
            }
        }
    }
    let middle = |ours, graph| median(figures[&(ours, graph)].iter().map(|f| f.latency.median_us));
    let (ours_host_us, raw_host_us) = host.worst(group)?;
    Ok(Row {
        op: what.name(),
        bytes,
        world_size: group.world_size(),
        ours_graph_us: middle(true, true),
        raw_graph_us: middle(false, true),
        ours_us: middle(true, false),
        raw_us: middle(false, false),
        ours_host_us,
        raw_host_us,
    })
}

/// Host times of this rank's consecutive calls: NCCL's, then ours.
#[derive(Default)]
struct HostTimes([Vec<f64>; 2]);

impl HostTimes {
    fn take(&mut self, group: &mut ProcessGroup, raw: &RawNccl, case: &Case) -> Result<()> {
        let device = group.device().context("no GPU")?.clone();
        let mut clock = HostClock::new(device, case.what, group.world_size())?;
        let case = Case { iterations: case.iterations.max(MIN_HOST_CALLS), ..*case };
        let mut whose = Vec::new();
        let found = measure_calls(group, &mut clock, &case, &mut |group, slot| {
            // The Thue-Morse sequence: neither side is first, or follows the other, more often.
            let ours = whose.len().count_ones().is_multiple_of(2);
            whose.push(ours);
            if ours { case.what.call(group, slot, case.reduction) } else { raw.call(case.what, slot) }
        })?;
        ensure!(found.errors == 0, "{} of {} bytes: {} wrong elements", case.what, case.bytes, found.errors);
        for (ours, us) in whose.into_iter().zip(clock.calls) {
            self.0[usize::from(ours)].extend(us);
        }
        Ok(())
    }

    /// Returns the medians of ours and of NCCL's, on the rank where the difference is largest.
    fn worst(self, group: &mut ProcessGroup) -> Result<(f64, f64)> {
        let [raw, ours] = self.0.map(|times| median(times.into_iter()));
        let all = group.all_gather_object(&(ours, raw))?;
        let more = |(ours, raw): &(f64, f64)| ours - raw;
        all.into_iter().max_by(|a, b| more(a).total_cmp(&more(b))).context("no ranks")
    }
}

/// Measures back-to-back all-reduces of 1 KiB. Returns the microseconds per call until all are complete and until they have
/// returned, ours first, then NCCL's.
fn in_a_row(group: &mut ProcessGroup, raw: &RawNccl, rounds: usize) -> Result<[(f64, f64); 2]> {
    let mut found: [Vec<(f64, f64)>; 2] = Default::default();
    for _ in 0..rounds.max(3) {
        let (ours, wrong) = calls_back_to_back(group, 1024, IN_A_ROW, |g, x| g.all_reduce(x, ReduceOp::Sum))?;
        let (theirs, wrong_too) = calls_back_to_back(group, 1024, IN_A_ROW, |_, x| raw.all_reduce(x))?;
        ensure!(wrong + wrong_too == 0, "wrong elements: {wrong} of ours, {wrong_too} of NCCL's");
        found[0].push(ours);
        found[1].push(theirs);
    }
    Ok(found.map(|all| (median(all.iter().map(|f| f.0)), median(all.iter().map(|f| f.1)))))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn print(rows: &[Row], raw: &RawNccl, [ours, theirs]: &[(f64, f64); 2]) {
    let head = [
        "operation",
        "bytes",
        "graph",
        "NCCL",
        "ratio",
        "one by one",
        "NCCL",
        "ratio",
        "host",
        "NCCL",
        "more",
    ];
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let us = |value: f64| format!("{value:.2}");
            vec![
                row.op.to_owned(),
                row.bytes.to_string(),
                us(row.ours_graph_us),
                us(row.raw_graph_us),
                us(row.ours_graph_us / row.raw_graph_us),
                us(row.ours_us),
                us(row.raw_us),
                us(row.ours_us / row.raw_us),
                us(row.ours_host_us),
                us(row.raw_host_us),
                us(row.ours_host_us - row.raw_host_us),
            ]
        })
        .collect();
    println!("NCCL {}, {} ranks, f32, microseconds", raw.version(), rows.first().map_or(0, |r| r.world_size));
    print!("{}", table::columns(&head, 1, &cells));
    println!(
        "all-reduce of 1 KiB in a row, {IN_A_ROW} calls: {:.2} us a call until done, {:.2} until returned; NCCL's {:.2} and {:.2}",
        ours.0, ours.1, theirs.0, theirs.1
    );
}
