//! Latency of collectives on GPUs within a CUDA graph, as in a decoder: each call works on the result of the previous call, in
//! memory that is in the caches.
//!
//! It needs a built `ryz` in the folder of this program. Elements are bf16. A figure is the time of one call: the time of a graph of
//! 20 calls divided by 20, the median over replays, on the slowest rank. All values are compared after the replays.
//! `benches/peers/sglang.py` measures SGLang's kernels by the same method.

#![expect(unsafe_code, reason = "a graph keeps addresses")]

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use half::bf16;
use ryzanstein_benches::measure::{CallBuffers, Collective, median};
use ryzanstein_benches::ranks;
use ryzanstein_orchestrator::table;
use ryzanstein_process_group::device::{Device, DeviceBuffer, Event};
use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{DType, Error, ProcessGroup, ReduceOp};
use ryzanstein_tensor_parallel::{Compute, Cuda, Tensor};
use serde::Serialize;

/// The measured operations. Each works in place.
const OPERATIONS: [Collective; 4] =
    [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::Broadcast];
/// Number of calls in a graph. The sum of two ranks' equal values doubles with each call, which is exact.
const CALLS: usize = 20;
const REPLAYS: usize = 20;
/// Untimed replays.
const WARM_UP: usize = 3;
const LATE: Duration = Duration::from_secs(20);
const EPSILON: f32 = 1e-5;

/// The result of a layer's operation.
type Step = ryzanstein_tensor_parallel::Result<()>;

/// Measures the latency of collectives on GPUs within a CUDA graph
#[derive(clap::Parser)]
struct Options {
    /// The number of ranks
    #[arg(long, default_value_t = 2)]
    world_size: usize,
    /// The lengths of the collectives' arrays
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = SIZES)]
    sizes: Vec<usize>,
    /// The numbers of rows of an all-reduce with norm
    #[arg(long, value_delimiter = ',', default_value = "1,4,8,16,32,64,128")]
    tokens: Vec<usize>,
    /// The lengths of those rows
    #[arg(long, value_delimiter = ',', default_value = "4096,8192")]
    hidden: Vec<usize>,
    /// The file for the rows
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

const SIZES: &str = "1024,2048,4096,8192,16384,32768,65536,131072,262144,524288,1048576,2097152,4194304,8388608,16777216,67108864,\
                     100000000";

/// One operation, size and path.
#[derive(Serialize)]
struct Row {
    op: &'static str,
    bytes: usize,
    /// Rows and their length, for a fused call.
    #[serde(skip_serializing_if = "Option::is_none")]
    shape: Option<[usize; 2]>,
    world_size: usize,
    path: String,
    us: f64,
}

fn main() -> Result<()> {
    ranks::main(|options: &Options| (options.world_size, "nccl"), rank)
}

fn rank(options: &Options) -> Result<()> {
    let mut orchestrator = ranks::initialize()?;
    let group = orchestrator.manager().world();
    ensure!(group.device().is_some(), "the group works on host memory: use --backend nccl");
    let mut rows = Vec::new();
    for &bytes in &options.sizes {
        for what in OPERATIONS {
            let (op, operation) = (what.name(), what.operation(ReduceOp::Sum));
            let mut paths: Vec<Option<Path>> = vec![None];
            paths.extend(group.paths().into_iter().filter(|path| path.suits(operation)).map(Some));
            for path in paths {
                group.force_path(path)?;
                let us = collective(group, what, bytes)?;
                let path = path.map_or("auto".to_owned(), |path| path.to_string());
                tell(
                    group,
                    &mut rows,
                    Row { op, bytes, shape: None, world_size: group.world_size(), path, us },
                )?;
            }
            group.force_path(None)?;
        }
    }
    for &hidden in &options.hidden {
        for &tokens in &options.tokens {
            for fused in [true, false] {
                if fused && !group.fuses_add_norm(DType::BF16, tokens, hidden) {
                    continue;
                }
                let us = add_norm(group, [tokens, hidden], fused)?;
                let path = if fused { "one kernel" } else { "three kernels" }.to_owned();
                let (bytes, shape) = (tokens * hidden * size_of::<bf16>(), Some([tokens, hidden]));
                let row =
                    Row { op: "all_reduce_add_norm", bytes, shape, world_size: group.world_size(), path, us };
                tell(group, &mut rows, row)?;
            }
        }
    }
    if group.rank().0 == 0 {
        print(&rows);
        if let Some(file) = &options.json {
            std::fs::write(file, serde_json::to_string(&rows)?).with_context(|| file.clone())?;
        }
    }
    Ok(orchestrator.finalize()?)
}

fn tell(group: &ProcessGroup, rows: &mut Vec<Row>, row: Row) -> Result<()> {
    if group.rank().0 == 0 {
        eprintln!("{}", serde_json::to_string(&row)?);
    }
    rows.push(row);
    Ok(())
}

/// Returns the microseconds of a call in place on `bytes` bytes, all ranks' chunks together.
fn collective(group: &mut ProcessGroup, what: Collective, bytes: usize) -> Result<f64> {
    let device = group.device().context("no GPU")?.clone();
    let stream = device.stream().clone();
    let (n, me) = (group.world_size(), group.rank().index());
    let chunk = (bytes / size_of::<bf16>() / n).max(1);
    let count = n * chunk;
    // Small enough to be doubled by every call.
    let value = |rank: usize, i: usize| ((i % 7 + rank + 1) as f32) * 2f32.powi(-80);
    let start: Vec<bf16> = (0..count).map(|i| bf16::from_f32(value(me, i))).collect();
    let calls = if bytes > 16 << 20 { CALLS / 5 } else { CALLS };
    let mut x = CallBuffers { input: None, buffer: DeviceBuffer::from_slice(&device, &start)? };
    // Setup at the first call is not part of a graph.
    what.call(group, &mut x, ReduceOp::Sum)?;
    // SAFETY: the graph is dropped before `x`, and the group is borrowed until then.
    let graph = unsafe {
        stream.capture::<Error>(|| (0..calls).try_for_each(|_| what.call(group, &mut x, ReduceOp::Sum)))
    }?;
    x.buffer.write(&stream, &start)?;
    graph.launch(&stream)?;
    let sum = |i: usize| (0..n).map(|rank| value(rank, i)).sum::<f32>();
    let got = x.buffer.to_vec::<bf16>(&stream)?;
    let (first, length) = if what == Collective::ReduceScatter { (me * chunk, chunk) } else { (0, count) };
    let is_exact = match what {
        Collective::AllReduce => n.is_power_of_two(),
        other => other != Collective::ReduceScatter,
    };
    let tolerance = if is_exact { 0.0 } else { 0.1 };
    for (i, got) in got.iter().enumerate().skip(first).take(length) {
        let want = match what {
            Collective::AllGather => value(i / chunk, i),
            Collective::Broadcast => value(0, i),
            // Each later call adds the others' terms to this rank's sum.
            Collective::ReduceScatter => value(me, i) + (sum(i) - value(me, i)) * calls as f32,
            _ => sum(i) * (n as f32).powi(calls as i32 - 1),
        };
        let got = got.to_f32();
        ensure!(
            (got - want).abs() <= tolerance * want,
            "{what} of {bytes} bytes: element {i} is {got}, not {want}"
        );
    }
    // Zeros stay zeros, whatever the number of additions.
    x.buffer.write(&stream, &vec![bf16::ZERO; count])?;
    let times = timed(group, &device, calls, || graph.launch(&stream))?;
    ensure!(
        x.buffer.to_vec::<bf16>(&stream)?.iter().all(|x| *x == bf16::ZERO),
        "{what} of {bytes} bytes: not all zeros"
    );
    slowest(group, times)
}

/// Returns the microseconds of an all-reduce, the addition of a residual and the norm of its rows.
fn add_norm(group: &mut ProcessGroup, shape: [usize; 2], fused: bool) -> Result<f64> {
    let device = group.device().context("no GPU")?.clone();
    let compute = Cuda::new(&device, 1)?;
    let [rows, columns] = shape;
    let me = group.rank().index();
    let values = |salt: usize, count: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 31 + salt * 17) % 13) as f32 / 4.0 - 1.5).collect()
    };
    let upload =
        |values: Vec<f32>, shape: &[usize], dtype| compute.upload(Tensor::new(shape, values, dtype)?);
    let mut x = upload(values(me, rows * columns), &shape, DType::BF16)?;
    let mut residual = upload(values(9, rows * columns), &shape, DType::BF16)?;
    let weight = upload(vec![1.0; columns], &[columns], DType::F32)?;
    let step = |group: &mut ProcessGroup, x: &mut Tensor, residual: &mut Tensor| -> Step {
        if fused {
            let mut out = compute.scratch(&shape, DType::BF16)?;
            group.all_reduce_add_norm(&*x, residual, (&weight, EPSILON), &mut out)?;
            *x = out;
            return Ok(());
        }
        group.all_reduce(x, ReduceOp::Sum)?;
        compute.add(residual, x)?;
        *x = compute.rms_norm(residual, &weight, EPSILON)?;
        Ok(())
    };
    step(group, &mut x, &mut residual)?;
    check_norm(&x, &residual, (group.world_size(), columns), &values)?;
    // SAFETY: the tensors, the group and the computation live until the graph is dropped, and nothing else uses them.
    let graph =
        unsafe { compute.capture(&mut || (0..CALLS).try_for_each(|_| step(group, &mut x, &mut residual))) }?;
    let graph = graph.context("a GPU replays graphs")?;
    let times = timed(group, &device, CALLS, || graph.replay())?;
    slowest(group, times)
}

fn check_norm(
    x: &Tensor,
    residual: &Tensor,
    (n, columns): (usize, usize),
    values: &dyn Fn(usize, usize) -> Vec<f32>,
) -> Result<()> {
    let (x, residual) = (x.values()?, residual.values()?);
    let terms: Vec<Vec<f32>> = (0..n).map(|rank| values(rank, x.len())).collect();
    let before = values(9, x.len());
    for (row, (x, residual)) in x.chunks(columns).zip(residual.chunks(columns)).enumerate() {
        let scale = (residual.iter().map(|r| r * r).sum::<f32>() / columns as f32 + EPSILON).sqrt();
        for (i, (x, r)) in x.iter().zip(residual).enumerate() {
            let at = row * columns + i;
            let want = before[at] + terms.iter().map(|values| values[at]).sum::<f32>();
            ensure!((r - want).abs() <= 0.01 * want.abs(), "residual {at} is {r}, not {want}");
            ensure!((x - r / scale).abs() <= 0.01 * (r / scale).abs(), "norm {at} is {x}, not {}", r / scale);
        }
    }
    Ok(())
}

/// Returns the microseconds of a call of a graph on this rank's GPU, for each replay. The ranks do not synchronise between the
/// replays: each waits for the others within them.
fn timed<E: Into<anyhow::Error>>(
    group: &mut ProcessGroup,
    device: &Device,
    calls: usize,
    mut launch: impl FnMut() -> Result<(), E>,
) -> Result<Vec<f64>> {
    let stream = device.stream();
    let (start, end) = (Event::new(stream, true)?, Event::new(stream, true)?);
    group.barrier()?;
    let mut times = Vec::with_capacity(REPLAYS);
    for replay in 0..WARM_UP + REPLAYS {
        start.record(stream)?;
        launch().map_err(Into::into)?;
        end.record(stream)?;
        let began = Instant::now();
        while !end.is_done()? {
            ensure!(began.elapsed() < LATE, "a graph has not ended after {LATE:?}");
        }
        if replay >= WARM_UP {
            times.push(end.since(&start)?.as_secs_f64() * 1e6 / calls as f64);
        }
    }
    Ok(times)
}

/// Returns the median on the rank where it is largest.
fn slowest(group: &mut ProcessGroup, times: Vec<f64>) -> Result<f64> {
    let all = group.all_gather_object(&median(times))?;
    Ok(all.into_iter().fold(0.0, f64::max))
}

fn print(rows: &[Row]) {
    let head = ["operation", "bytes", "shape", "path", "us"];
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let shape = row.shape.map_or("-".to_owned(), |[rows, columns]| format!("{rows} x {columns}"));
            vec![row.op.to_owned(), row.bytes.to_string(), shape, row.path.clone(), format!("{:.2}", row.us)]
        })
        .collect();
    println!(
        "{} ranks, bf16, microseconds of a call in a graph",
        rows.first().map_or(0, |row| row.world_size)
    );
    print!("{}", table::columns(&head, 1, &cells));
}
