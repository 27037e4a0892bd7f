//! The time of a token when several sequences get one in the same pass, compared with a pass of one sequence, and the time of a
//! prompt.
//!
//! It needs a built `ryz` in the folder of this program; `--help` lists its flags. Without `--model`, the layers have the shapes of
//! an 8-billion-parameter Llama (436 MB per layer) and random weights. All sequences hold the same tokens, so their logits must agree
//! up to rounding, which is checked at each pass. With `RYZ_MODEL__NUMERICS=invariant` their bits must agree. It prints a digest of the
//! first sequence's logits. `benches/peers/hugging_face.py` is the program to compare with on CPUs.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use ryzanstein_benches::cupti::KernelTimes;
use ryzanstein_benches::measure::median;
use ryzanstein_benches::nodes::{self, Reads};
use ryzanstein_benches::ranks;
use ryzanstein_benches::suite::steps::{self, ModelShape};
use ryzanstein_config::Numerics;
use ryzanstein_orchestrator::table;
use ryzanstein_process_group::{DType, ProcessGroup, units};
use ryzanstein_tensor_parallel::compute::PAGE_SIZE;
use ryzanstein_tensor_parallel::{CacheSize, Compute as _, Cuda, Llama, NextTokens, Passes, Tensor};
use serde_json::json;
use sha2::{Digest as _, Sha256};

/// Number of different tokens, which every model must have.
const VOCABULARY: usize = 32_000;
/// Untimed passes: the first runs eagerly, the second is captured.
const WARM_UP: usize = 4;
/// Timed prompts of each length.
const PROMPTS: usize = 5;
/// Rows and columns of the matrix that measures the bandwidth of the memory: 4 GiB.
const LARGE: [usize; 2] = [1 << 18, 1 << 13];

/// Measures the time of a token when several sequences get one in the same pass, and the time of a prompt
#[derive(clap::Parser)]
struct Work {
    /// The number of ranks
    #[arg(long, default_value_t = 4)]
    world_size: usize,
    /// The backend
    #[arg(long, default_value = "auto")]
    backend: String,
    /// The number of layers, without --model
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// The folder of a model
    #[arg(long, value_name = "DIR", value_parser = |path: &str| std::fs::canonicalize(path))]
    model: Option<PathBuf>,
    /// The type in which weights are held: that of the checkpoint, or bf16 without --model
    #[arg(long)]
    dtype: Option<DType>,
    /// The numbers of sequences
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64")]
    sequences: Vec<usize>,
    /// The number of tokens before the first pass
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    prompt: usize,
    /// The number of timed passes
    #[arg(long, default_value = "50")]
    passes: NonZeroUsize,
    /// The lengths of timed prompts
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    prefill: Vec<usize>,
    /// Compare three passes: the sequences alone, a chunk of another prompt alone, and both together. All give the same logits
    #[arg(long, value_name = "TOKENS")]
    chunk: Option<usize>,
    /// Print each kernel of a captured pass on rank 0: its time, its gap and its share of the bandwidth
    #[arg(long, value_name = "SEQUENCES", value_delimiter = ',')]
    nodes: Vec<usize>,
    /// The file for the times in microseconds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Then repeat one prompt, or the passes of N sequences, and print the microseconds of each, until this is killed
    #[arg(long, value_name = "prompt=TOKENS|sequences=N")]
    follow: Option<Follow>,
}

/// The measurement that is repeated.
#[derive(Clone, Copy)]
enum Follow {
    Prompt(usize),
    Sequences(usize),
}

impl FromStr for Follow {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once('=') {
            Some(("prompt", tokens)) => Ok(Self::Prompt(tokens.parse()?)),
            Some(("sequences", n)) => Ok(Self::Sequences(n.parse()?)),
            _ => bail!("`{text}` is neither prompt=TOKENS nor sequences=N"),
        }
    }
}

fn main() -> Result<()> {
    ranks::main(|work: &Work| (work.world_size, &work.backend), rank)
}

fn rank(work: &Work) -> Result<()> {
    let mut orchestrator = ranks::initialize()?;
    let group = orchestrator.manager().world();
    ensure!(
        work.nodes.is_empty() || group.device().is_some(),
        "--nodes needs GPUs: passes on CPUs are not captured in graphs"
    );
    let model = if let Some(folder) = &work.model {
        Arc::new(Llama::load(folder, work.dtype, group)?)
    } else {
        let tokens_per_layer = VOCABULARY.div_ceil(work.layers.max(1));
        let shape = ModelShape { tokens_per_layer, ..ModelShape::llama_8b() };
        steps::load(&shape.config(work.layers)?, work.dtype.unwrap_or(DType::BF16), group)?
    };
    let mut results = Vec::new();
    let kinds = if group.device().is_some() { &[Passes::Eager, Passes::Graph][..] } else { &[Passes::Eager] };
    let mut rows = Vec::new();
    let mut of_first = None;
    for &n in &work.sequences {
        let passes =
            kinds.iter().map(|kind| pass(&model, n, work, *kind, group)).collect::<Result<Vec<_>>>()?;
        let times: Vec<f64> = passes.iter().map(|passes| passes.time).collect();
        let best = times.iter().copied().fold(f64::INFINITY, f64::min);
        let token_to_token = greedy(&model, n, work, kinds[kinds.len() - 1], group)?;
        let first = *of_first.get_or_insert(token_to_token);
        let mut row = vec![n.to_string()];
        row.extend(times.iter().map(|time| units::time(time * 1e6)));
        row.push(units::time(token_to_token * 1e6));
        row.extend([format!("{:.1}", n as f64 / token_to_token), format!("{:.2}", token_to_token / first)]);
        let digests: BTreeSet<&str> = passes.iter().map(|passes| &*passes.digest).collect();
        row.push(Vec::from_iter(digests).join(" "));
        rows.push(row);
        let token_to_token = token_to_token * 1e6;
        results.push(json!({"sequences": n, "prompt": work.prompt, "us": best * 1e6, "token_to_token_us": token_to_token}));
    }
    let mut head = vec!["sequences", "one by one"];
    head.extend(kinds.get(1).map(|_| "in a graph"));
    head.extend(["token to token", "tokens/s", "of the first's", "digest"]);
    let is_first = group.rank().0 == 0;
    if is_first && !rows.is_empty() {
        print!("{}", table::columns(&head, 0, &rows));
    }
    let mut rows = Vec::new();
    for &tokens in &work.prefill {
        let time = prompt(&model, tokens, group)?;
        rows.push(vec![tokens.to_string(), units::time(time * 1e6), format!("{:.1}", tokens as f64 / time)]);
        results.push(json!({"prefill": tokens, "us": time * 1e6}));
    }
    if is_first && !rows.is_empty() {
        print!("{}", table::columns(&["prompt", "time", "tokens/s"], 0, &rows));
    }
    let mut rows = Vec::new();
    for (chunk, &n) in work.chunk.iter().flat_map(|chunk| work.sequences.iter().map(move |n| (*chunk, n))) {
        let [decode, alone, both] = with_chunks(&model, n, chunk, work, group)?;
        let mut row = vec![n.to_string(), chunk.to_string()];
        row.extend([decode, alone, both].map(|time| units::time(time * 1e6)));
        row.push(format!("{:.2}", both / (decode + alone)));
        rows.push(row);
        results.push(json!({"sequences": n, "chunk": chunk, "us": both * 1e6}));
    }
    if is_first && !rows.is_empty() {
        let head = ["sequences", "chunk", "tokens alone", "chunk alone", "in one pass", "ratio"];
        print!("{}", table::columns(&head, 0, &rows));
    }
    if let Some(file) = work.json.as_ref().filter(|_| is_first) {
        std::fs::write(file, serde_json::to_string(&results)?).with_context(|| file.display().to_string())?;
    }
    print_nodes(&model, work, group)?;
    while let Some(follow) = work.follow {
        let time = match follow {
            Follow::Prompt(tokens) => one_prompt(&model, tokens, group)?,
            Follow::Sequences(n) => pass(&model, n, work, kinds[0], group)?.time,
        };
        if is_first {
            println!("{:.0}", time * 1e6);
        }
    }
    drop(model);
    Ok(orchestrator.finalize()?)
}

fn token(at: usize) -> u32 {
    (at * 37 % VOCABULARY) as u32
}

/// Returns the median time in seconds of prompts of `tokens` tokens.
fn prompt(model: &Arc<Llama>, tokens: usize, group: &mut ProcessGroup) -> Result<f64> {
    // The first prompt warms up.
    one_prompt(model, tokens, group)?;
    let times = (0..PROMPTS).map(|_| one_prompt(model, tokens, group)).collect::<Result<Vec<_>>>()?;
    Ok(median(times))
}

/// Returns the time in seconds from a prompt of `tokens` tokens to its logits.
fn one_prompt(model: &Arc<Llama>, tokens: usize, group: &mut ProcessGroup) -> Result<f64> {
    let text: Vec<u32> = (0..tokens).map(token).collect();
    let mut decoder = model.decoder(CacheSize::full(1, tokens), Passes::Eager)?;
    group.barrier()?;
    let started = Instant::now();
    let logits = decoder.prefill(0, &text, group)?;
    let took = started.elapsed().as_secs_f64();
    check(logits, group.numerics())?;
    Ok(took)
}

/// Prints the nodes of the graphs of `work.nodes` sequences.
fn print_nodes(model: &Arc<Llama>, work: &Work, group: &mut ProcessGroup) -> Result<()> {
    if work.nodes.is_empty() {
        return Ok(());
    }
    let recorder = (group.rank().0 == 0).then(KernelTimes::record).transpose()?;
    let bandwidth = recorder.as_ref().map(|recorder| bandwidth(recorder, group)).transpose()?;
    for &n in &work.nodes {
        pass(model, n, work, Passes::Graph, group)?;
        let (Some(recorder), Some(bandwidth)) = (&recorder, bandwidth) else { continue };
        let mut kernels = recorder.take()?;
        kernels.retain(|kernel| kernel.is_node);
        // All passes but the first replay the graph.
        let replays = WARM_UP - 1 + work.passes.get();
        let positions = work.prompt + WARM_UP + work.passes.get() / 2;
        let reads = Reads::new(model.config(), model.dtype().size(), group.world_size(), n, positions);
        let table = nodes::table(&kernels, replays, &reads, bandwidth).with_context(|| {
            format!("the kernels of passes of {n} sequences differ, or are not those of this model")
        })?;
        print!("\n{n} sequences, {:.0} GB/s:\n{table}", bandwidth / 1e9);
    }
    Ok(())
}

/// Returns the bytes per second at which a product of one row reads a large matrix.
fn bandwidth(recorder: &KernelTimes, group: &ProcessGroup) -> Result<f64> {
    let compute = Cuda::new(group.device().context("a group without GPUs")?, 1)?;
    let matrix = compute.zeros(&LARGE, DType::BF16)?;
    let x = compute.zeros(&[1, LARGE[1]], DType::BF16)?;
    for _ in 0..PROMPTS {
        compute.linear(&x, &matrix, None, DType::BF16)?.values()?;
    }
    let times = recorder.take()?.into_iter().filter(|kernel| nodes::PRODUCTS.contains(&&*kernel.name));
    let best = times.map(|kernel| kernel.end - kernel.start).min().context("CUPTI recorded no kernel")?;
    Ok(matrix.bytes() as f64 / best as f64 * 1e9)
}

/// The median time in seconds of some passes, and the first 48 bits of the SHA-256 of the first sequence's logits in all of them,
/// warm-up included.
struct Measured {
    time: f64,
    digest: String,
}

/// Measures passes that give each of `n` sequences a token.
fn pass(
    model: &Arc<Llama>,
    n: usize,
    work: &Work,
    kind: Passes,
    group: &mut ProcessGroup,
) -> Result<Measured> {
    let (prompt, passes) = (work.prompt, work.passes.get());
    let text: Vec<u32> = (0..prompt).map(token).collect();
    let mut decoder = model.decoder(CacheSize::full(n, prompt + WARM_UP + passes), kind)?;
    let mut hash = Sha256::new();
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
        check(logits, group.numerics())?;
        logits.values()?[..logits.columns()].iter().for_each(|logit| hash.update(logit.to_le_bytes()));
        if at >= WARM_UP {
            times.push(took);
        }
    }
    let digest = hash.finalize().iter().take(6).fold(0, |all, byte| all << 8 | u64::from(*byte));
    Ok(Measured { time: median(times), digest: format!("{digest:012x}") })
}

/// Returns the time in seconds from one token of each of `n` sequences to the next, as greedy passes choose them: on GPUs, a pass starts
/// before the host has the tokens of the one before.
fn greedy(model: &Arc<Llama>, n: usize, work: &Work, kind: Passes, group: &mut ProcessGroup) -> Result<f64> {
    let (prompt, passes) = (work.prompt, work.passes.get());
    let text: Vec<u32> = (0..prompt).map(token).collect();
    let mut decoder = model.decoder(CacheSize::full(n, prompt + WARM_UP + passes), kind)?;
    let mut times = Vec::new();
    let prompts: Vec<_> = (0..n).map(|sequence| (sequence, NextTokens::Known(&text[..]))).collect();
    let chosen: Vec<_> = (0..n).map(|sequence| (sequence, NextTokens::Chosen)).collect();
    let mut pass = decoder.start_greedy(&prompts, group)?;
    let mut started = Instant::now();
    for _ in 0..WARM_UP + passes {
        let next = decoder.start_greedy(&chosen, group)?;
        let tokens: Vec<u32> = pass.wait(group)?.into_iter().collect::<Result<_, _>>()?;
        // Rounding may part the sequences of a batch.
        ensure!(
            group.numerics() == Numerics::Fast || tokens.iter().all(|token| *token == tokens[0]),
            "sequences with the same tokens go on with {tokens:?}"
        );
        pass = next;
        times.push(started.elapsed().as_secs_f64());
        started = Instant::now();
    }
    pass.wait(group)?;
    Ok(median(times.split_off(WARM_UP)))
}

/// Returns the median times in seconds of passes that give each of `n` sequences a token, that give one more sequence `chunk` tokens of
/// its prompt, and that do both.
fn with_chunks(
    model: &Arc<Llama>,
    n: usize,
    chunk: usize,
    work: &Work,
    group: &mut ProcessGroup,
) -> Result<[f64; 3]> {
    let (prompt, passes) = (work.prompt, work.passes.get());
    // From an eighth of the prompt to twice it.
    let length = |sequence: usize| (prompt * (1 + sequence * 7 % 16)).div_ceil(8);
    let longest = (2 * prompt).max(chunk) + chunk + 1;
    // A sequence holds less than a page more than it needs.
    let positions =
        (0..n).map(|sequence| length(sequence) + 1 + PAGE_SIZE).sum::<usize>() + longest + PAGE_SIZE;
    let size = CacheSize::full(n + 1, longest).with_positions(positions);
    let mut decoder = model.decoder(size, Passes::Graph)?;
    let text: Vec<u32> = (0..longest).map(token).collect();
    let lengths: Vec<usize> = (0..n).map(length).chain([chunk]).collect();
    for (sequence, length) in lengths.iter().enumerate() {
        decoder.prefill(sequence, &text[..*length], group)?;
    }
    let next = |sequence: usize, tokens| (sequence, &text[lengths[sequence]..lengths[sequence] + tokens]);
    let decode: Vec<_> = (0..n).map(|sequence| next(sequence, 1)).collect();
    let alone = vec![next(n, chunk)];
    let both = [&decode[..], &alone].concat();
    let mut times = [(); 3].map(|()| Vec::new());
    // The logits of the first two passes of a round.
    let mut expected = Vec::new();
    for at in 0..WARM_UP + passes {
        for (pairs, times) in [&decode, &alone, &both].into_iter().zip(&mut times) {
            group.barrier()?;
            let started = Instant::now();
            let logits = decoder.step(pairs, group)?;
            let took = started.elapsed().as_secs_f64();
            if at >= WARM_UP {
                times.push(took);
            }
            let (values, columns) = (logits.values()?, logits.columns());
            if expected.len() < both.len() * columns {
                expected.extend_from_slice(&values);
            } else {
                let rows = expected.chunks_exact(columns).zip(values.chunks_exact(columns));
                for (sequence, (alone, both)) in rows.enumerate() {
                    same(alone, both, group.numerics()).with_context(|| format!("sequence {sequence}"))?;
                }
                expected.clear();
            }
            for (sequence, _) in pairs {
                decoder.truncate(*sequence, lengths[*sequence]);
            }
        }
    }
    Ok(times.map(median))
}

/// Checks that all rows agree.
fn check(logits: &Tensor, numerics: Numerics) -> Result<()> {
    let values = logits.values()?;
    let first = &values[..logits.columns()];
    for (row, values) in values.chunks_exact(first.len()).enumerate() {
        same(first, values, numerics).with_context(|| format!("the first row and row {row}"))?;
    }
    Ok(())
}

/// Checks that two rows of logits agree: to the bit with invariant numerics, otherwise up to the rounding of matrix products, which a
/// library may split differently for different rows.
fn same(one: &[f32], other: &[f32], numerics: Numerics) -> Result<()> {
    let greatest = one.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    ensure!(greatest.is_finite() && greatest > 0.0, "the greatest logit is {greatest}");
    // Also false for what is no number.
    let is_near = one.iter().zip(other).all(|(a, b)| (a - b).abs() <= 0.02 * greatest);
    let same = one.iter().map(|v| v.to_bits()).eq(other.iter().map(|v| v.to_bits()));
    ensure!(numerics == Numerics::Fast || same, "logits have other bits");
    ensure!(is_near, "logits are more than 2 % of the greatest one, {greatest}, apart");
    Ok(())
}
