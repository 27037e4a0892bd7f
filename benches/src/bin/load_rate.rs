//! How quickly ranks load their shares of a model, beside plain reads of as many bytes from the same files.
//!
//! `load_rate [--world-size 4] [--backend auto] [--layers 8] [--rounds 3] [--folder DIR]` needs a built `ryz` beside this
//! program. It writes a checkpoint with the layers of an 8-billion-parameter Llama (436 MB each in bf16, and 0.5 GB beside) into a
//! folder of its own in DIR (else the system's for temporary files) and removes it at the end. The files have just been
//! written, so that both read the page cache; a plain read is one thread a rank, 8 MiB at a time into the same memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use ryzanstein_config::{Config, Sources};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_process_group::table;
use ryzanstein_tensor_parallel::Llama;

const HIDDEN: usize = 4096;
const INNER: usize = 14336;
const KEY_VALUE: usize = 1024;
const VOCABULARY: usize = 32000;
const FILE: &str = "model.safetensors";
const PIECE: usize = 8 << 20;

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
            _ => bail!("unknown flag {flag}; see the head of this file"),
        }
    }
    let this = std::env::current_exe()?;
    let ryz = this.with_file_name("ryz");
    ensure!(ryz.exists(), "{} is not there: run `cargo build --release` first", ryz.display());
    let folder = tempfile::tempdir_in(&options.folder)?;
    write_checkpoint(folder.path(), options.layers)?;
    let ranks = options.world_size.to_string();
    let status = Command::new(ryz)
        .args(["launch", "--backend", &options.backend, "--world-size", &ranks, "--"])
        .arg(this)
        .arg("rank")
        .arg(folder.path())
        .arg(options.rounds.to_string())
        .status()?;
    ensure!(status.success(), "the ranks ended with {status}");
    Ok(())
}

/// Names and shapes, in the order of the file.
fn tensors(layers: usize) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN])];
    for layer in 0..layers {
        let mut add = |name: &str, shape: &[usize]| {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        add("input_layernorm", &[HIDDEN]);
        add("self_attn.q_proj", &[HIDDEN, HIDDEN]);
        add("self_attn.k_proj", &[KEY_VALUE, HIDDEN]);
        add("self_attn.v_proj", &[KEY_VALUE, HIDDEN]);
        add("self_attn.o_proj", &[HIDDEN, HIDDEN]);
        add("post_attention_layernorm", &[HIDDEN]);
        add("mlp.gate_proj", &[INNER, HIDDEN]);
        add("mlp.up_proj", &[INNER, HIDDEN]);
        add("mlp.down_proj", &[HIDDEN, INNER]);
    }
    all.push(("model.norm.weight".to_owned(), vec![HIDDEN]));
    all.push(("lm_head.weight".to_owned(), vec![VOCABULARY, HIDDEN]));
    all
}

fn write_checkpoint(folder: &Path, layers: usize) -> Result<()> {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "tie_word_embeddings": false,
    });
    std::fs::write(folder.join("config.json"), config.to_string())?;
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors(layers) {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(name, entry);
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(PIECE, File::create(folder.join(FILE))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    // Small numbers of both signs.
    let piece: Vec<u8> =
        (0..PIECE / 2).flat_map(|i| [(i % 251) as u8, 0x3c | ((i % 2) << 7) as u8]).collect();
    let mut left = end;
    while left > 0 {
        let now = left.min(PIECE);
        file.write_all(&piece[..now])?;
        left -= now;
    }
    file.flush().with_context(|| format!("writing {} into {}", table::bytes(end as f64), folder.display()))
}

/// Bytes, seconds of the plain read, seconds of the load: on one rank, in one round.
type Round = (u64, f64, f64);

fn rank(folder: &Path, rounds: usize) -> Result<()> {
    let environment: BTreeMap<String, String> = std::env::vars().collect();
    let sources = Sources { environment: environment.clone().into_iter().collect(), ..Sources::default() };
    let mut rank = Orchestrator::initialize(&Config::load(&sources)?, &environment)?;
    let file = File::open(folder.join(FILE))?;
    let mut memory = vec![0; PIECE];
    let mut mine: Vec<Round> = Vec::new();
    // The first is a warm-up: the GPU's memory, pinned buffers and the page tables are made then.
    for round in 0..=rounds {
        let group = rank.manager().world();
        let (n, me) = (group.world_size() as u64, u64::from(group.rank().0));
        group.barrier()?;
        let model = Llama::load(folder, None, group)?;
        // Until every rank has its weights; the first pass behind it, on GPUs, is no loading.
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
    let group = rank.manager().world();
    let all = group.all_gather_object(&mine)?;
    if group.rank().0 == 0 {
        print(&all);
    }
    Ok(rank.finalize()?)
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
                table::bytes(rounds[0].0 as f64),
                format!("{loading:.2}"),
                format!("{plain:.2}"),
                format!("{:.2}", loading / plain),
            ]
        })
        .collect();
    print!("{}", table::columns(&["rank", "bytes", "load GB/s", "plain GB/s", "ratio"], 0, &rows));
}
