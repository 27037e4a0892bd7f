//! The cost of a rank as the number of ranks on one host grows: time, memory and sockets.
//!
//! `scale [--ranks 2,4,8,16,32,64] [--json FILE]` runs each number of ranks as threads of one process, then as processes, and
//! needs a built `ryz` in the folder of this program. Sums are checked. With more ranks than processors it measures how the
//! system schedules them: each step of a collective waits until the system has run the other ranks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use ryzanstein_benches::ranks;
use ryzanstein_config::{BackendChoice, Config};
use ryzanstein_orchestrator::table;
use ryzanstein_process_group::{ProcessGroup, ReduceOp, units};
use serde::{Deserialize, Serialize};

/// Elements of the small and of the large all-reduce, each with the number of timed calls.
const SIZES: [(usize, usize); 2] = [(256, 101), (1 << 18, 11)];

#[derive(Serialize, Deserialize)]
struct Row {
    ranks: usize,
    ranks_are: String,
    /// Milliseconds from before the ranks are started to the end of the first checked all-reduce, on rank 0.
    start_ms: f64,
    /// Median latencies on rank 0.
    all_reduce_1k_us: f64,
    all_reduce_1m_us: f64,
    /// Memory of each rank, its share of shared pages included, after the all-reduces.
    memory_mb: f64,
    sockets: f64,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, file, started] = &arguments[..]
        && first == "rank"
    {
        return process(Path::new(file), Duration::from_nanos(started.parse()?));
    }
    let (mut counts, mut json) = (vec![2, 4, 8, 16, 32, 64], None);
    for pair in arguments.chunks(2) {
        let [flag, value] = pair else { bail!("{} needs a value", pair[0]) };
        match flag.as_str() {
            "--ranks" => counts = ranks::numbers(value)?,
            "--json" => json = Some(PathBuf::from(value)),
            other => bail!("unknown flag {other}; see the top of this file"),
        }
    }
    let mut rows = Vec::new();
    for &count in &counts {
        rows.push(threads(count)?);
        rows.push(processes(count)?);
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let times = [row.start_ms * 1e3, row.all_reduce_1k_us, row.all_reduce_1m_us].map(units::time);
            let mut cells = vec![row.ranks.to_string(), row.ranks_are.clone()];
            cells.extend(times);
            cells.extend([format!("{:.1} MB", row.memory_mb), format!("{:.0}", row.sockets)]);
            cells
        })
        .collect();
    print!("{}", table::columns(&["ranks", "as", "start", "1 KiB", "1 MiB", "memory", "sockets"], 2, &cells));
    if let Some(file) = json {
        std::fs::write(&file, serde_json::to_vec_pretty(&rows)?)
            .with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn threads(count: usize) -> Result<Row> {
    let mut config = Config::default();
    config.process_group.backend = BackendChoice::Tcp;
    config.profile.slow_call = Duration::MAX;
    let started = now()?;
    let mut row = ranks::threads(&config, count, |mut manager| measure(manager.world(), started, "threads"))?;
    // Each rank reports the whole process, so the mean is the total of the process.
    row.memory_mb /= count as f64;
    row.sockets /= count as f64;
    Ok(row)
}

fn processes(count: usize) -> Result<Row> {
    let file = std::env::temp_dir().join(format!("scale-{}.json", std::process::id()));
    let mut command = ranks::command(count, "tcp")?;
    ranks::run(command.arg(&file).arg(now()?.as_nanos().to_string()))?;
    let row = serde_json::from_slice(&std::fs::read(&file)?)?;
    std::fs::remove_file(&file)?;
    Ok(row)
}

fn process(file: &Path, started: Duration) -> Result<()> {
    let mut job = ranks::initialize()?;
    let group = job.manager().world();
    let row = measure(group, started, "processes")?;
    if group.rank().0 == 0 {
        std::fs::write(file, serde_json::to_vec(&row)?)?;
    }
    Ok(job.finalize()?)
}

fn measure(group: &mut ProcessGroup, started: Duration, ranks_are: &str) -> Result<Row> {
    let ranks = group.world_size();
    let expected = (ranks * (ranks + 1) / 2) as f32;
    let mine = (group.rank().0 + 1) as f32;
    let mut start = None;
    let mut medians = Vec::new();
    for (elements, times) in SIZES {
        let mut x = vec![f32::NAN; elements];
        let mut took = Vec::new();
        for _ in 0..times {
            x.fill(mine);
            group.barrier()?;
            let before = Instant::now();
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            took.push(before.elapsed());
            ensure!(x.iter().all(|sum| *sum == expected), "a sum is wrong");
            start.get_or_insert(now()?.saturating_sub(started).as_secs_f64() * 1e3);
        }
        took.sort();
        medians.push(took[times / 2].as_secs_f64() * 1e6);
    }
    group.barrier()?;
    let mut used = [memory()?, sockets()?];
    group.all_reduce(&mut used, ReduceOp::Sum)?;
    Ok(Row {
        ranks,
        ranks_are: ranks_are.to_owned(),
        start_ms: start.unwrap_or_default(),
        all_reduce_1k_us: medians[0],
        all_reduce_1m_us: medians[1],
        memory_mb: used[0] / ranks as f64,
        sockets: used[1] / ranks as f64,
    })
}

fn now() -> Result<Duration> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?)
}

/// Returns the megabytes of this process, including its share of the pages that it shares with other processes.
fn memory() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).context("no Pss")?;
    Ok(line.split_whitespace().next().context("no number")?.parse::<f64>()? * 1024.0 / 1e6)
}

fn sockets() -> Result<f64> {
    let mut count = 0;
    for entry in std::fs::read_dir("/proc/self/fd")? {
        // The descriptor of the folder itself is gone.
        if let Ok(target) = std::fs::read_link(entry?.path()) {
            count += i32::from(target.to_string_lossy().starts_with("socket:"));
        }
    }
    Ok(f64::from(count))
}
