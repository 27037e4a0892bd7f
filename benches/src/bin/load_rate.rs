//! The rate at which ranks load their shards of a model, compared with plain reads of as many bytes from the same files.
//!
//! `load_rate [--world-size 4] [--backend auto] [--layers 8] [--rounds 3] [--folder DIR]` needs a built `ryz` in the folder of this
//! program. It writes a checkpoint with the layers of an 8-billion-parameter Llama (436 MB each in bf16, plus 0.5 GB) into a
//! separate folder in DIR (by default the temporary folder) and removes it at the end. The files have just been
//! written, so both sides read the page cache; a plain read is one thread per rank, 8 MiB at a time into the same memory.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use ryzanstein_benches::checkpoint::{self, FILE, PIECE};
use ryzanstein_benches::ranks;
use ryzanstein_orchestrator::table;
use ryzanstein_process_group::units;
use ryzanstein_tensor_parallel::Llama;

struct Options {
    world_size: usize,
    backend: String,
    layers: usize,
    rounds: usize,
    folder: PathBuf,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, folder, rounds] = &arguments[..]
        && first == "rank"
    {
        return rank(Path::new(folder), rounds.parse()?);
    }
    let mut options =
        Options { world_size: 4, backend: "auto".into(), layers: 8, rounds: 3, folder: std::env::temp_dir() };
    for pair in arguments.chunks(2) {
        let [flag, value] = pair else { bail!("{} needs a value", pair[0]) };
        match flag.as_str() {
            "--world-size" => options.world_size = value.parse().context("--world-size")?,
            "--backend" => options.backend.clone_from(value),
            "--layers" => options.layers = value.parse().context("--layers")?,
            "--rounds" => options.rounds = value.parse().context("--rounds")?,
            "--folder" => options.folder = value.into(),
            _ => bail!("unknown flag {flag}; see the top of this file"),
        }
    }
    let folder = tempfile::tempdir_in(&options.folder)?;
    checkpoint::write(folder.path(), options.layers)?;
    let rounds = options.rounds.to_string();
    let mut command = ranks::command(options.world_size, &options.backend)?;
    Ok(ranks::run(command.arg(folder.path()).arg(rounds))?)
}

/// Bytes, seconds of the plain read and seconds of the load, on one rank in one round.
type Round = (u64, f64, f64);

fn rank(folder: &Path, rounds: usize) -> Result<()> {
    let mut orchestrator = ranks::initialize()?;
    let file = File::open(folder.join(FILE))?;
    let mut memory = vec![0; PIECE];
    let mut mine: Vec<Round> = Vec::new();
    // The first round is a warm-up: it creates GPU memory, pinned buffers and page tables.
    for round in 0..=rounds {
        let group = orchestrator.manager().world();
        let (n, me) = (group.world_size() as u64, u64::from(group.rank().0));
        group.barrier()?;
        let model = Llama::load(folder, None, group)?;
        // Until every rank has its weights; on GPUs, the first pass that follows is not included.
        let (bytes, loading) = (model.report().bytes_read, model.report().elapsed.as_secs_f64());
        drop(model);
        group.barrier()?;
        let started = Instant::now();
        let first = file.metadata()?.len() / n * me;
        let mut done = 0;
        while done < bytes {
            let piece = memory.len().min((bytes - done) as usize);
            let read =
                file.read_at(&mut memory[..piece], (first + done) % (file.metadata()?.len() - PIECE as u64))?;
            ensure!(read > 0, "the checkpoint ended early");
            done += read as u64;
        }
        let plain = started.elapsed().as_secs_f64();
        if round > 0 {
            mine.push((bytes, plain, loading));
        }
    }
    let group = orchestrator.manager().world();
    let all = group.all_gather_object(&mine)?;
    if group.rank().0 == 0 {
        print(&all);
    }
    Ok(orchestrator.finalize()?)
}

fn print(all: &[Vec<Round>]) {
    let middle = |values: Vec<f64>| {
        let mut values = values;
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let rows: Vec<Vec<String>> = all
        .iter()
        .enumerate()
        .map(|(rank, rounds)| {
            let rate = |seconds: fn(&Round) -> f64| {
                middle(rounds.iter().map(|round| round.0 as f64 / seconds(round) / 1e9).collect())
            };
            let (plain, loading) = (rate(|r| r.1), rate(|r| r.2));
            vec![
                rank.to_string(),
                units::bytes(rounds[0].0 as f64),
                format!("{loading:.2}"),
                format!("{plain:.2}"),
                format!("{:.2}", loading / plain),
            ]
        })
        .collect();
    print!("{}", table::columns(&["rank", "bytes", "load GB/s", "plain GB/s", "ratio"], 0, &rows));
}
