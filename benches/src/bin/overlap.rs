//! How much of the reduction of gradients a backward pass hides, by size of the buckets; and a reduction in 16 bits next to f32.
//!
//! `overlap [--world-size 2] [--megabytes 64] [--parameters 64] [--compute-ms MS] [--kind busy|idle] [--steps 10]` needs a built `ryz` in
//! the folder of this program. A step is a synthetic backward pass on host memory: some compute for each parameter, from the last
//! to the first, then its gradient is written. Without `--compute-ms` the compute of a step takes as long as the reduction of its
//! gradients does alone. `busy` computes on this host's processors, which the reduction needs, too; `idle` waits as long, as a host
//! does whose accelerator computes. Every gradient of a last, untimed step is compared with its exact value.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ryzanstein_benches::ranks;
use ryzanstein_orchestrator::table;
use ryzanstein_process_group::{
    BucketOptions, BucketedReducer, Parameter, ProcessGroup, Rank, ReduceOp, WireType, units,
};

/// Sizes of buckets.
const BUCKETS: [usize; 4] = [1_000_000, 5_000_000, 25_000_000, 100_000_000];
/// Sizes of compressed reductions, in bytes of f32.
const COMPRESSED: [usize; 3] = [100_000, 10_000_000, 100_000_000];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, megabytes, parameters, compute, kind, steps] = &arguments[..]
        && first == "rank"
    {
        let parameters: usize = parameters.parse()?;
        let elements = megabytes.parse::<usize>()? * 1_000_000 / 4 / parameters;
        let compute = compute.parse().ok().map(|ms: f64| Duration::from_secs_f64(ms / 1e3));
        return rank(elements, parameters, compute, kind == "idle", steps.parse()?);
    }
    let mut world_size = 2;
    let (mut megabytes, mut parameters, mut compute, mut kind, mut steps) =
        ("64", "64", "auto", "busy", "10");
    for pair in arguments.chunks(2) {
        let [flag, value] = pair else { bail!("{} needs a value", pair[0]) };
        match flag.as_str() {
            "--world-size" => world_size = value.parse().context("--world-size")?,
            "--megabytes" => megabytes = value,
            "--parameters" => parameters = value,
            "--compute-ms" => compute = value,
            "--kind" if ["busy", "idle"].contains(&value.as_str()) => kind = value,
            "--steps" => steps = value,
            _ => bail!("unknown flag {flag} {value}; see the top of this file"),
        }
    }
    for (flag, number) in [("--megabytes", megabytes), ("--parameters", parameters), ("--steps", steps)] {
        let number: usize = number.parse().context(flag)?;
        ensure!(number > 0, "{flag} must be greater than 0");
    }
    ensure!(compute == "auto" || compute.parse::<f64>().is_ok_and(|ms| ms >= 0.0), "--compute-ms {compute}");
    let mut command = ranks::command(world_size, "tcp")?;
    Ok(ranks::run(command.args([megabytes, parameters, compute, kind, steps]))?)
}

fn rank(
    elements: usize,
    parameters: usize,
    wanted: Option<Duration>,
    is_idle: bool,
    steps: usize,
) -> Result<()> {
    let mut orchestrator = ranks::initialize()?;
    let group = orchestrator.manager().world();
    let model: Vec<Parameter> =
        (0..parameters).map(|i| Parameter::new::<f32>(format!("parameter {i}"), elements)).collect();
    let mut ways = vec![Way::one_by_one(&model)];
    for bytes in BUCKETS {
        ways.push(Way::in_buckets(group, &model, bytes)?);
    }
    let compute = match wanted {
        Some(time) => time,
        None => median(group, steps, |group, step| ways[0].step(group, &Compute::default(), step))?,
    };
    let compute = Compute::new(group, compute / parameters as u32, is_idle)?;

    // All in turn, so that whatever else the machine does meets all.
    let mut computing = Vec::new();
    let mut times = vec![(Vec::new(), Vec::new()); ways.len()];
    for step in 0..=steps {
        computing.push(time(group, |_| {
            (0..parameters).for_each(|_| compute.run());
            Ok(())
        })?);
        for (way, (alone, with_compute)) in ways.iter_mut().zip(&mut times) {
            alone.push(time(group, |group| way.step(group, &Compute::default(), step + 1))?);
            with_compute.push(time(group, |group| way.step(group, &compute, step + 1))?);
        }
    }
    let computing = median_of(group, computing)?;
    let mut rows: Vec<Row> = Vec::new();
    for (way, (alone, step)) in ways.iter_mut().zip(times) {
        way.step(group, &compute, 0)?;
        way.check(group)?;
        let (alone, step) = (median_of(group, alone)?, median_of(group, step)?);
        rows.push(Row { name: way.name(), calls: way.calls(), alone, step });
    }
    drop(ways);
    let is_first = group.rank() == Rank(0);
    if is_first {
        println!(
            "{} of f32 gradients in {parameters} parameters, {} ranks; compute of a step ({}) {}",
            units::bytes((4 * elements * parameters) as f64),
            group.world_size(),
            if is_idle { "idle" } else { "busy" },
            show(computing),
        );
        let head = ["buckets of", "all-reduces", "alone", "step", "hidden", "of the first's"];
        let rows: Vec<Vec<String>> = rows.iter().map(|row| row.cells(computing, rows[0].step)).collect();
        print!("{}", table::columns(&head, 0, &rows));
    }
    let rows: Vec<Vec<String>> =
        COMPRESSED.iter().map(|bytes| compressed(group, *bytes, steps)).collect::<Result<_>>()?;
    if is_first {
        println!(
            "\nall-reduce of f32 values, sent as they are and in 16 bits; errors relative to the sum of absolute values"
        );
        let head = ["bytes", "f32", "bf16", "f32/bf16", "error", "bound", "f16", "f32/f16", "error", "bound"];
        print!("{}", table::columns(&head, 0, &rows));
    }
    Ok(orchestrator.finalize()?)
}

/// One way to reduce the gradients of a step.
struct Row {
    name: String,
    /// All-reduces of a step.
    calls: usize,
    /// The time of a step without compute, and with it.
    alone: Duration,
    step: Duration,
}

impl Row {
    fn cells(&self, computing: Duration, first: Duration) -> Vec<String> {
        let exposed = self.step.as_secs_f64() - computing.as_secs_f64();
        vec![
            self.name.clone(),
            self.calls.to_string(),
            show(self.alone),
            show(self.step),
            format!("{:.0} %", 100.0 * (1.0 - exposed / self.alone.as_secs_f64()).clamp(0.0, 1.0)),
            format!("{:.2}", self.step.as_secs_f64() / first.as_secs_f64()),
        ]
    }
}

fn show(time: Duration) -> String {
    units::time(time.as_secs_f64() * 1e6)
}

/// Seconds of a step that all ranks begin together, on this rank.
fn time(group: &mut ProcessGroup, step: impl FnOnce(&mut ProcessGroup) -> Result<()>) -> Result<f64> {
    group.barrier()?;
    let started = Instant::now();
    step(group)?;
    Ok(started.elapsed().as_secs_f64())
}

/// The median over all steps but the first, each on its slowest rank.
fn median_of(group: &mut ProcessGroup, mut times: Vec<f64>) -> Result<Duration> {
    times.remove(0);
    group.all_reduce(&mut times, ReduceOp::Max)?;
    times.sort_by(f64::total_cmp);
    Ok(Duration::from_secs_f64(times[times.len() / 2]))
}

fn median(
    group: &mut ProcessGroup,
    steps: usize,
    mut step: impl FnMut(&mut ProcessGroup, usize) -> Result<()>,
) -> Result<Duration> {
    let times: Result<Vec<f64>> = (0..=steps).map(|at| time(group, |group| step(group, at + 1))).collect();
    median_of(group, times?)
}

/// The compute of one parameter.
#[derive(Default)]
struct Compute {
    /// How long the host waits.
    waiting: Duration,
    /// How many [`rounds`] its processors compute.
    rounds: u64,
}

impl Compute {
    /// All ranks do as many rounds as take this long when all compute at once.
    fn new(group: &mut ProcessGroup, of_parameter: Duration, is_idle: bool) -> Result<Self> {
        const TRIAL: u64 = 20_000_000;
        if is_idle {
            return Ok(Self { waiting: of_parameter, rounds: 0 });
        }
        let trial = median(group, 5, |_, _| {
            rounds(TRIAL);
            Ok(())
        })?;
        let rounds = of_parameter.as_secs_f64() / trial.as_secs_f64() * TRIAL as f64;
        Ok(Self { waiting: Duration::ZERO, rounds: rounds as u64 })
    }

    fn run(&self) {
        if !self.waiting.is_zero() {
            std::thread::sleep(self.waiting);
        }
        rounds(self.rounds);
    }
}

/// Work for a processor that touches no memory.
fn rounds(count: u64) {
    black_box((0..count).fold(1.0f32, |x, _| black_box(x) * 0.999 + 0.001));
}

/// What a rank computes in element `i`: sums of these are exact.
fn computed(rank: usize, parameter: usize, i: usize) -> f32 {
    ((i + 3 * rank + 5 * parameter) % 61) as f32
}

fn write(gradient: &mut [f32], rank: usize, parameter: usize, step: usize) {
    // Timed steps only store: the values of the check take longer.
    if step > 0 {
        return gradient.fill(step as f32);
    }
    for (i, x) in gradient.iter_mut().enumerate() {
        *x = computed(rank, parameter, i);
    }
}

/// How gradients are reduced.
enum Way {
    /// One all-reduce per parameter, after the backward pass.
    OneByOne(Vec<Vec<f32>>),
    /// Buckets of at most this many bytes. Each starts when its gradients are ready.
    InBuckets(usize, BucketedReducer),
}

impl Way {
    fn one_by_one(model: &[Parameter]) -> Self {
        Self::OneByOne(model.iter().map(|parameter| vec![0.0; parameter.count]).collect())
    }

    fn in_buckets(group: &ProcessGroup, model: &[Parameter], bytes: usize) -> Result<Self> {
        let options = BucketOptions { bucket_bytes: bytes, op: ReduceOp::Sum, ..BucketOptions::default() };
        Ok(Self::InBuckets(bytes, BucketedReducer::new(group, model, &options)?))
    }

    fn name(&self) -> String {
        match self {
            Self::OneByOne(_) => "none".to_owned(),
            Self::InBuckets(bytes, _) => units::bytes(*bytes as f64),
        }
    }

    fn calls(&self) -> usize {
        match self {
            Self::OneByOne(gradients) => gradients.len(),
            Self::InBuckets(_, reducer) => reducer.buckets().len(),
        }
    }

    fn parameters(&self) -> usize {
        match self {
            Self::OneByOne(gradients) => gradients.len(),
            Self::InBuckets(_, reducer) => {
                reducer.buckets().iter().map(|bucket| bucket.parameters.len()).sum()
            }
        }
    }

    fn gradient(&mut self, parameter: usize) -> Result<&mut [f32]> {
        Ok(match self {
            Self::OneByOne(gradients) => &mut gradients[parameter],
            Self::InBuckets(_, reducer) => reducer.gradient(parameter)?,
        })
    }

    fn step(&mut self, group: &mut ProcessGroup, compute: &Compute, step: usize) -> Result<()> {
        let me = group.rank().index();
        for parameter in (0..self.parameters()).rev() {
            compute.run();
            write(self.gradient(parameter)?, me, parameter, step);
            if let Self::InBuckets(_, reducer) = self {
                reducer.mark_ready(group, parameter)?;
            }
        }
        match self {
            Self::OneByOne(gradients) => {
                for gradient in gradients.iter_mut().rev() {
                    group.all_reduce(gradient, ReduceOp::Sum)?;
                }
            }
            Self::InBuckets(_, reducer) => drop(reducer.finish(group)?),
        }
        Ok(())
    }

    /// Compares every value after step 0.
    fn check(&mut self, group: &ProcessGroup) -> Result<()> {
        for parameter in 0..self.parameters() {
            for (i, got) in self.gradient(parameter)?.iter().enumerate() {
                let sum: f32 = (0..group.world_size()).map(|rank| computed(rank, parameter, i)).sum();
                ensure!(*got == sum, "element {i} of parameter {parameter} is {got} and must be {sum}");
            }
        }
        Ok(())
    }
}

/// Any value between -1 and 1 that no 16-bit type holds.
fn operand(rank: usize, i: usize) -> f32 {
    let mixed = (i as u64 ^ ((rank as u64 + 1) << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// One size: times, and the largest errors on this rank, which has the same bits as all others.
fn compressed(group: &mut ProcessGroup, bytes: usize, steps: usize) -> Result<Vec<String>> {
    let (n, me) = (group.world_size(), group.rank().index());
    let operands: Vec<f32> = (0..bytes / 4).map(|i| operand(me, i)).collect();
    let mut values = operands.clone();
    let plain = median(group, steps, |group, _| Ok(group.all_reduce(&mut values, ReduceOp::Avg)?))?;
    let mut row = vec![units::bytes(bytes as f64), show(plain)];
    for wire in [WireType::Bf16, WireType::F16] {
        let time = median(group, steps, |group, _| {
            Ok(group.all_reduce_compressed(&mut values, ReduceOp::Avg, wire)?)
        })?;
        values.copy_from_slice(&operands);
        group.all_reduce_compressed(&mut values, ReduceOp::Sum, wire)?;
        let mut largest = 0.0f64;
        for (i, got) in values.iter().enumerate() {
            let of = |rank| f64::from(operand(rank, i));
            let (sum, magnitude) = (0..n).map(of).fold((0.0, 0.0), |(s, m), x| (s + x, m + x.abs()));
            largest = largest.max((f64::from(*got) - sum).abs() / f64::max(magnitude, 0.01));
        }
        ensure!(largest <= wire.error_bound(n), "{wire}: an error of {largest} exceeds the bound");
        row.push(show(time));
        row.push(format!("{:.2}", plain.as_secs_f64() / time.as_secs_f64()));
        row.push(format!("{largest:.1e}"));
        row.push(format!("{:.1e}", wire.error_bound(n)));
    }
    Ok(row)
}
