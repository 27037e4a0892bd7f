//! What a token costs when several sequences get one in the same pass, compared with a pass of one sequence.
//!
//! `decode_rate [--world-size 4] [--backend auto] [--layers 8] [--sequences 1,2,4,8,16,32,64] [--prompt 512] [--passes 50]
//! [--folder DIR]` needs a built `ryz` in the folder of this program. It writes a checkpoint as `load_rate` does and removes it at the end.
//! All sequences hold the same tokens, so their logits must agree up to rounding, which is checked at each pass.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use ryzanstein_benches::checkpoint::{self, VOCABULARY};
use ryzanstein_benches::ranks;
use ryzanstein_orchestrator::table;
use ryzanstein_process_group::{ProcessGroup, units};
use ryzanstein_tensor_parallel::{Llama, Passes, Tensor};

/// Untimed passes: the first runs eagerly, the second is captured.
const WARM_UP: usize = 4;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, folder, sequences, prompt, passes] = &arguments[..]
        && first == "rank"
    {
        let sequences = sequences.split(',').map(str::parse).collect::<Result<Vec<_>, _>>()?;
        return rank(Path::new(folder), &sequences, prompt.parse()?, passes.parse()?);
    }
    let (mut world_size, mut backend, mut layers) = (4, "auto".to_owned(), 8);
    let (mut sequences, mut prompt, mut passes) = ("1,2,4,8,16,32,64".to_owned(), "512", "50");
    let mut folder: PathBuf = std::env::temp_dir();
    for pair in arguments.chunks(2) {
        let [flag, value] = pair else { bail!("{} needs a value", pair[0]) };
        match flag.as_str() {
            "--world-size" => world_size = value.parse().context("--world-size")?,
            "--backend" => backend.clone_from(value),
            "--layers" => layers = value.parse().context("--layers")?,
            "--sequences" => sequences.clone_from(value),
            "--prompt" => prompt = value,
            "--passes" => passes = value,
            "--folder" => folder = value.into(),
            _ => bail!("unknown flag {flag}; see the top of this file"),
        }
    }
    let folder = tempfile::tempdir_in(&folder)?;
    checkpoint::write(folder.path(), layers)?;
    let mut command = ranks::command(world_size, &backend)?;
    Ok(ranks::run(command.arg(folder.path()).args([&sequences, prompt, passes]))?)
}

fn rank(folder: &Path, sequences: &[usize], prompt: usize, passes: usize) -> Result<()> {
    let mut orchestrator = ranks::initialize()?;
    let group = orchestrator.manager().world();
    let model = Arc::new(Llama::load(folder, None, group)?);
    let mut rows = Vec::new();
    let mut of_first = None;
    for n in sequences {
        let [eager, recorded] =
            [Passes::Eager, Passes::Graph].map(|kind| pass(&model, *n, (prompt, passes), kind, group));
        let (eager, recorded) = (eager?, recorded?);
        let first = *of_first.get_or_insert(recorded);
        rows.push(vec![
            n.to_string(),
            units::time(eager * 1e6),
            units::time(recorded * 1e6),
            format!("{:.0}", *n as f64 / recorded),
            format!("{:.2}", recorded / first),
        ]);
    }
    if group.rank().0 == 0 {
        let head = ["sequences", "one by one", "in a graph", "tokens/s", "of the first's"];
        print!("{}", table::columns(&head, 0, &rows));
    }
    drop(model);
    Ok(orchestrator.finalize()?)
}

/// Median seconds of a pass that gives each of `n` sequences a token.
fn pass(
    model: &Arc<Llama>,
    n: usize,
    (prompt, passes): (usize, usize),
    kind: Passes,
    group: &mut ProcessGroup,
) -> Result<f64> {
    let token = |at: usize| (at * 37 % VOCABULARY) as u32;
    let text: Vec<u32> = (0..prompt).map(token).collect();
    let mut decoder = model.decoder(n, prompt + WARM_UP + passes, kind)?;
    for sequence in 0..n {
        decoder.prefill(sequence, &text, group)?;
    }
    let mut times = Vec::new();
    for at in 0..WARM_UP + passes {
        let tokens: Vec<_> = (0..n).map(|sequence| (sequence, token(prompt + at))).collect();
        group.barrier()?;
        let started = Instant::now();
        let logits = decoder.decode(&tokens, group)?;
        let took = started.elapsed().as_secs_f64();
        check(logits)?;
        if at >= WARM_UP {
            times.push(took);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// All rows agree up to the rounding of matrix products, which a library may split differently for different rows.
fn check(logits: &Tensor) -> Result<()> {
    let values = logits.values()?;
    let first = &values[..logits.columns()];
    let greatest = first.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    ensure!(greatest.is_finite() && greatest > 0.0, "the greatest logit is {greatest}");
    for (row, values) in values.chunks_exact(first.len()).enumerate() {
        let far = first.iter().zip(values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        ensure!(far <= 0.02 * greatest, "row {row} is {far} away from the first, of {greatest}");
    }
    Ok(())
}
