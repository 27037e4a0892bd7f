//! The small random checkpoints of `fixtures/`, and what `transformers` computes from them (see `fixtures/README.md`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use ryzanstein_tensor_parallel::LlamaConfig;
use ryzanstein_tensor_parallel::model::{TensorSpec, tensors};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

/// Prefix of the names of fixtures of types of rope.
const ROPE: &str = "rope-";

/// The checkpoint folders, except those of types of rope.
pub fn fixtures() -> impl Iterator<Item = &'static str> {
    all().filter(|name| !name.starts_with(ROPE))
}

/// The checkpoint folders of types of rope.
pub fn rope_fixtures() -> impl Iterator<Item = &'static str> {
    all().filter(|name| name.starts_with(ROPE))
}

/// The names of all folders with an expectation.
fn all() -> impl Iterator<Item = &'static str> {
    static NAMES: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
        let entries = std::fs::read_dir(folder("")).expect("a folder of fixtures");
        let folders = entries.map(|entry| entry.expect("an entry").path());
        let folders = folders.filter(|folder| folder.join("expected.safetensors").exists());
        folders.filter_map(|folder| Some(folder.file_name()?.to_str()?.to_owned())).collect()
    });
    NAMES.iter().map(String::as_str)
}

/// Where a fixture is. Where `CARGO_MANIFEST_DIR` is set when the test runs, as cargo does for the tests of every member of this
/// workspace, that counts: a test binary may have been built elsewhere.
pub fn folder(name: &str) -> PathBuf {
    let member = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let mut above = Path::new(&member).ancestors().map(|folder| folder.join("tests/fixtures").join(name));
    above
        .find(|folder| folder.exists())
        .unwrap_or_else(|| panic!("no tests/fixtures/{name} above {}", member.display()))
}

/// The world sizes up to eight that a fixture's heads and widths can be cut for.
pub fn world_sizes(name: &str) -> &'static [usize] {
    match name {
        "heads-6" | "qwen3-bias-window" => &[1, 3, 6],
        "mistral-window" => &[1, 2, 4],
        _ if name.starts_with(ROPE) => &[1, 2, 4],
        _ => &[1, 2, 4, 8],
    }
}

/// The expectation of one fixture.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Token ids to begin with.
    pub prompt: Vec<u32>,
    /// Their continuation by greedy decoding in f32.
    pub tokens: Vec<u32>,
    /// f32 logits of every position that was fed, `[positions, vocabulary]`.
    pub logits: Vec<f32>,
    /// The same from the prompt and then one token after the other, where that makes a difference.
    pub stepwise: Option<Vec<f32>>,
    /// The same from a model that computes in the checkpoint's own 16-bit type, where it has one.
    pub native: Option<Vec<f32>>,
    /// Tokens there are.
    pub vocabulary: usize,
}

impl Expected {
    /// Reads a fixture's expectation.
    ///
    /// # Panics
    /// When the file is not there or not of this form.
    pub fn read(name: &str) -> Self {
        let bytes = std::fs::read(folder(name).join("expected.safetensors")).expect("an expectation");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let ids = |key| {
            let data = file.tensor(key).expect("token ids").data();
            data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")) as u32).collect()
        };
        let (shape, logits) = floats(&file, "logits").expect("logits");
        Self {
            prompt: ids("prompt"),
            tokens: ids("tokens"),
            logits,
            stepwise: floats(&file, "logits_stepwise").map(|(_, values)| values),
            native: floats(&file, "logits_native").map(|(_, values)| values),
            vocabulary: shape[1],
        }
    }

    /// The logits of one position.
    pub fn row(&self, position: usize) -> &[f32] {
        &self.logits[position * self.vocabulary..][..self.vocabulary]
    }

    /// The prompt and all new tokens but the last: what the logits were computed from.
    pub fn input(&self) -> Vec<u32> {
        let fed = &self.tokens[..self.tokens.len() - 1];
        self.prompt.iter().chain(fed).copied().collect()
    }
}

/// Writes a checkpoint of f32 noise for the settings in the text `config`. Returns its tensors.
///
/// # Panics
/// When the settings are wrong or the folder is not writable.
pub fn write_noise(folder: &Path, config: &str) -> Vec<TensorSpec> {
    std::fs::write(folder.join("config.json"), config).expect("a writable folder");
    let specs = tensors(&LlamaConfig::from_folder(folder).expect("settings of a model")).expect("a model");
    let noise = |spec: &TensorSpec| -> Vec<u8> {
        let count = spec.shape.iter().product::<usize>();
        (0..count).flat_map(|i| (i as f32).sin().to_le_bytes()).collect()
    };
    let data: Vec<Vec<u8>> = specs.iter().map(noise).collect();
    let views = specs.iter().zip(&data).map(|(spec, data)| {
        (spec.name.clone(), TensorView::new(Dtype::F32, spec.shape.clone(), data).expect("the shape's bytes"))
    });
    let file = safetensors::serialize(views, None).expect("safetensors");
    std::fs::write(folder.join("model.safetensors"), file).expect("a writable folder");
    specs
}

/// Shape and values of the tensor `logits` of a file.
///
/// # Panics
/// When the file is not there or not of this form.
pub fn logits(file: &Path) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(file).expect("a file of logits");
    floats(&SafeTensors::deserialize(&bytes).expect("safetensors"), "logits").expect("logits")
}

fn floats(file: &SafeTensors<'_>, key: &str) -> Option<(Vec<usize>, Vec<f32>)> {
    let tensor = file.tensor(key).ok()?;
    let values = tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")));
    Some((tensor.shape().to_vec(), values.collect()))
}
