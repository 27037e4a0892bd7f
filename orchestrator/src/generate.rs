//! `ryz generate`: text generation with a tensor-parallel model.

use std::path::{Path, PathBuf};

use ryzanstein_config::{ModelConfig, ModelDType};
use ryzanstein_process_group::{DType, table};
use ryzanstein_tensor_parallel::{
    Error, GenerateOptions, LlamaConfig, LoadReport, Sampling, StopReason, Tensor, Tokenizer,
};
use serde_json::{Value, json};

use crate::Orchestrator;

/// The prompt.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Text; the folder must have a `tokenizer.json`.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// The model's folder.
    pub model: PathBuf,
    /// The prompt.
    pub prompt: Prompt,
    /// Where rank 0 writes the f32 logits `[positions, vocabulary]` of the prompt and the generated tokens, unpadded.
    pub logits_out: Option<PathBuf>,
    /// Continue after the end-of-text token.
    pub ignore_end: bool,
}

/// The result.
#[derive(Clone, Debug)]
pub struct Response {
    /// Generated ids, without the prompt.
    pub tokens: Vec<u32>,
    /// The same as text, if there is a tokenizer.
    pub text: Option<String>,
    /// Why generation ended.
    pub stop: StopReason,
    /// Load statistics of each rank, in rank order.
    pub loads: Vec<LoadStats>,
    /// This rank's profile as a table.
    pub profile: String,
}

/// Load statistics of one rank.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub struct LoadStats {
    /// Bytes of weights read from files.
    pub bytes_read: u64,
    /// Bytes of weights in all files.
    pub checkpoint_bytes: u64,
    /// Seconds.
    pub seconds: f64,
}

impl From<&LoadReport> for LoadStats {
    fn from(report: &LoadReport) -> Self {
        Self {
            bytes_read: report.bytes_read,
            checkpoint_bytes: report.checkpoint_bytes,
            seconds: report.elapsed.as_secs_f64(),
        }
    }
}

impl Response {
    /// The one line that rank 0 prints on stdout.
    pub fn json(&self) -> Value {
        let mut line = json!({ "token_ids": self.tokens });
        if let Some(text) = &self.text {
            line["text"] = json!(text);
        }
        line["stop"] = json!(match self.stop {
            StopReason::Length => "length",
            StopReason::End(_) => "end_token",
        });
        line["load"] = json!(self.loads);
        line
    }
}

/// Creates the empty file for the logits, so that one that cannot be written is refused before a model is loaded.
///
/// # Errors
/// [`Error::Input`] names the file.
pub fn create_logits(file: &Path) -> Result<(), Error> {
    std::fs::File::create(file).map(drop).map_err(|error| cannot_write(file, &error))
}

/// A checked prompt, and the tokenizer if the folder has one.
#[derive(Debug)]
pub struct PreparedPrompt {
    /// The model's settings.
    pub config: LlamaConfig,
    tokens: Vec<u32>,
    tokenizer: Option<Tokenizer>,
}

/// Encodes the prompt, and refuses requests beyond the model's limits, before any weight is read.
///
/// # Errors
/// Names the settings or the tokenizer that cannot be read, the token outside the vocabulary, or the maximum number of new
/// tokens.
pub fn prepare(settings: &ModelConfig, request: &Request) -> Result<PreparedPrompt, Error> {
    let config = LlamaConfig::from_folder(&request.model)?;
    let tokenizer = Tokenizer::open(&request.model)?;
    let tokens = match (&request.prompt, &tokenizer) {
        (Prompt::Tokens(tokens), _) => tokens.clone(),
        (Prompt::Text(text), Some(tokenizer)) => tokenizer.encode(text)?,
        (Prompt::Text(_), None) => {
            return Err(Error::Input(format!(
                "a prompt in words needs a tokenizer, and {} has no tokenizer.json; give --token-ids instead",
                request.model.display()
            )));
        }
    };
    check_prompt(&config, request, &tokens, settings.max_new_tokens as usize)?;
    Ok(PreparedPrompt { config, tokens, tokenizer })
}

/// Checks a prompt and the number of new tokens against the model's limits.
fn check_prompt(config: &LlamaConfig, request: &Request, prompt: &[u32], more: usize) -> Result<(), Error> {
    let (file, length) = (request.model.join("config.json"), prompt.len());
    let file = file.display();
    let &LlamaConfig { vocabulary, max_positions: most, .. } = config;
    if prompt.is_empty() {
        return Err(Error::Input("the prompt has no tokens; give at least one to go on from".into()));
    }
    if let Some(token) = prompt.iter().find(|token| **token as usize >= vocabulary) {
        let remedy = match request.prompt {
            Prompt::Tokens(_) => format!("give ids from 0 to {}", vocabulary.saturating_sub(1)),
            Prompt::Text(_) => {
                "the tokenizer.json next to it produces such tokens, so it belongs to another model".into()
            }
        };
        return Err(Error::Input(format!(
            "token {token} is not in the vocabulary of {vocabulary} (`vocab_size` of {file}); {remedy}"
        )));
    }
    if length > most {
        return Err(Error::Input(format!(
            "the prompt has {length} tokens, and the model takes {most} (`max_position_embeddings` of {file}); shorten the \
             prompt"
        )));
    }
    // The last token is never fed back, so it needs no position.
    let room = most - length + 1;
    if more > room {
        return Err(Error::Input(format!(
            "--max-new-tokens {more} behind a prompt of {length} tokens needs {} positions, and the model has {most} \
             (`max_position_embeddings` of {file}); ask for at most --max-new-tokens {room}, or shorten the prompt",
            length + more - 1
        )));
    }
    Ok(())
}

/// Loads the model and generates from what [`prepare`] returned for the same settings and request. Every rank calls this.
///
/// # Errors
/// Those of the model and of the collectives, and when `logits_out` cannot be written.
pub fn run(
    orchestrator: &mut Orchestrator,
    settings: &ModelConfig,
    request: &Request,
    input: PreparedPrompt,
) -> Result<Response, Error> {
    let PreparedPrompt { tokens: prompt, tokenizer, .. } = input;
    if let Some(file) = request.logits_out.as_deref().filter(|_| orchestrator.tensor_parallel().rank().0 == 0)
    {
        create_logits(file)?;
    }
    let dtype = settings.dtype.map(|dtype| match dtype {
        ModelDType::F16 => DType::F16,
        ModelDType::Bf16 => DType::BF16,
        ModelDType::F32 => DType::F32,
    });
    let model = orchestrator.load_model(&request.model, dtype)?;
    let sampling = if settings.temperature.get() == 0.0 {
        Sampling::Greedy
    } else {
        Sampling::Random {
            temperature: settings.temperature.get().into(),
            top_p: settings.top_p.get().into(),
            seed: settings.seed,
        }
    };
    let options = GenerateOptions {
        max_new_tokens: settings.max_new_tokens as usize,
        sampling,
        ignore_end: request.ignore_end,
        graph: settings.graph,
    };
    let group = orchestrator.tensor_parallel();
    let loads = group.all_gather_object(&LoadStats::from(model.report()))?;
    group.profile().clear();
    let generated = model.generate(&prompt, &options, group)?;
    let profile = table::profile(&group.profile().rows());
    if let Some(file) = &request.logits_out {
        // Once more, all positions at once: the same cache, the same sums. The last token is not an input.
        let mut all = prompt.clone();
        all.extend(&generated.tokens);
        all.truncate(prompt.len() + generated.tokens.len().saturating_sub(1));
        let mut cache = model.cache(all.len())?;
        let logits = model.forward(&all, &mut cache, group)?;
        if group.rank().0 == 0 {
            write_logits(file, &logits)?;
        }
    }
    let text = tokenizer.map(|t| t.decode(&generated.tokens)).transpose()?;
    Ok(Response { tokens: generated.tokens, text, stop: generated.stop, loads, profile })
}

fn write_logits(file: &Path, logits: &Tensor) -> Result<(), Error> {
    let bytes: Vec<u8> = logits.values()?.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, logits.shape().to_vec(), &bytes)
        .map_err(|error| Error::Input(format!("logits: {error}")))?;
    let data = safetensors::serialize([("logits", view)], None)
        .map_err(|error| Error::Input(format!("logits: {error}")))?;
    std::fs::write(file, data).map_err(|error| cannot_write(file, &error))
}

fn cannot_write(file: &Path, error: &std::io::Error) -> Error {
    Error::Input(format!(
        "cannot write --logits-out {}: {error}; name a file in an existing writable folder",
        file.display()
    ))
}
