//! Memory of a rank on CPUs: its shard once, and not a second time while it loads.
//!
//! A test program of its own: `RUSAGE_CHILDREN` gives the maximum over all children, and a child starts with its parent's memory.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use ryzanstein_tensor_parallel::LlamaConfig;
use ryzanstein_tensor_parallel::model::{TensorSpec, tensors};
use ryzanstein_tests::fixtures::folder;
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(300);

/// 310 MB in bf16.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 8192, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": false, "dtype": "bfloat16"}"#;

/// Writes settings and weights, in the order of names, as transformers does. This process must stay small, so no tensor is ever whole
/// in its memory.
fn write(folder: &Path) -> std::io::Result<()> {
    std::fs::write(folder.join("config.json"), CONFIG)?;
    let mut specs =
        tensors(&LlamaConfig::from_folder(folder).expect("settings of a model")).expect("a model");
    specs.sort_by(|a, b| a.name.cmp(&b.name));
    let count = |spec: &TensorSpec| spec.shape.iter().product::<usize>();
    let mut end = 0;
    let entries = specs.iter().map(|spec| {
        let start = end;
        end += 2 * count(spec);
        let entry = json!({"dtype": "BF16", "shape": spec.shape, "data_offsets": [start, end]});
        (spec.name.clone(), entry)
    });
    let mut header = Value::Object(entries.collect()).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::new(File::create(folder.join("model.safetensors"))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for i in 0..specs.iter().map(count).sum::<usize>() {
        // Small numbers of both signs.
        file.write_all(&[(i % 251) as u8, 0x3c | ((i % 2) << 7) as u8])?;
    }
    file.flush()
}

/// Ends the command when a test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Generates two tokens. The line of JSON that says so.
fn generate(model: &Path, ranks: usize) -> Value {
    let out = tempfile::NamedTempFile::new().expect("a temporary file");
    let child = Command::new(env!("CARGO_BIN_EXE_ryz"))
        .args([
            "generate",
            "--backend",
            "tcp",
            "--token-ids",
            "1,2,3",
            "--max-new-tokens",
            "2",
            "--ignore-end",
        ])
        .args(["--format", "json", "--world-size", &ranks.to_string(), "--model"])
        .arg(model)
        .env("XDG_STATE_HOME", "/nowhere")
        .stdin(Stdio::null())
        .stdout(out.reopen().expect("the same file"))
        .spawn()
        .expect("ryz starts");
    let mut child = Running(child);
    let deadline = Instant::now() + LONG;
    let status = loop {
        if let Some(status) = child.0.try_wait().expect("a child") {
            break status;
        }
        assert!(Instant::now() < deadline, "{ranks} ranks did not end within {LONG:?}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success(), "{ranks} ranks: {status}");
    serde_json::from_reader(File::open(out.path()).expect("the output")).expect("one line of JSON")
}

/// The greatest resident set of any process so far that this one, or a child of it, has waited for. In bytes.
fn peak() -> u64 {
    getrusage(UsageWho::RUSAGE_CHILDREN).expect("usage").max_rss() as u64 * 1024
}

#[test]
fn a_rank_on_cpus_takes_the_memory_of_its_shard_once() {
    let model = tempfile::tempdir().expect("a temporary folder");
    write(model.path()).expect("a checkpoint");
    // The program itself, its threads and its connections: what a model of 79 kB takes. It is measured, as builds differ.
    generate(&folder("llama-gqa"), 2);
    let program = peak();
    // Two ranks first: each takes less than the one.
    for ranks in [2, 1] {
        let line = generate(model.path(), ranks);
        let loads = line["load"].as_array().expect("a list").iter();
        let shard = loads.map(|load| load["bytes_read"].as_u64().expect("bytes")).max().expect("a rank");
        let peak = peak();
        println!("{ranks} ranks: at most {peak} bytes for {shard} of the shard and {program} of the program");
        assert!(peak >= shard, "{ranks} ranks: {peak} bytes are less than the {shard} of the shard");
        assert!(
            peak <= shard * 115 / 100 + program,
            "{ranks} ranks: {peak} bytes are more than 1.15 times the {shard} of the shard and {program} of the program"
        );
    }
}
