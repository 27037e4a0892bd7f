//! `ryz generate`: a model that goes on from a prompt, its weights cut over the ranks.

use std::path::{Path, PathBuf};

use ryzanstein_config::{ModelConfig, ModelDType};
use ryzanstein_process_group::table;
use ryzanstein_tensor_parallel::{
    Dtype, Error, GenerateOptions, LlamaConfig, LoadReport, Sampling, StopReason, Tensor, Tokenizer,
};
use serde_json::{Value, json};

use crate::Orchestrator;

/// What to go on from.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Text; the folder must have a `tokenizer.json`.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// What to do.
#[derive(Clone, Debug)]
pub struct Request {
    /// The model's folder.
    pub model: PathBuf,
    /// What to go on from.
    pub prompt: Prompt,
    /// Where to write f32 logits `[positions, vocabulary]` of the prompt and the tokens made, unpadded. Rank 0 writes.
    pub logits_out: Option<PathBuf>,
    /// Go on behind the model's end token.
    pub ignore_end: bool,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Response {
    /// Ids made, without the prompt.
    pub tokens: Vec<u32>,
    /// The same as text, where there is a tokenizer.
    pub text: Option<String>,
    /// Why it ended.
    pub stop: StopReason,
    /// What loading took on each rank, in rank order.
    pub loads: Vec<LoadStats>,
    /// This rank's profile as a table.
    pub profile: String,
}

/// What loading took on one rank.
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

/// Makes the empty file that logits go to, so that one that cannot be written is refused before a model is loaded.
///
/// # Errors
/// Names the file.
pub fn create_logits(file: &Path) -> Result<(), Error> {
    std::fs::File::create(file).map(drop).map_err(|error| cannot_write(file, &error))
}

/// A prompt that the model can take, and what turns words into tokens and back, where the folder has it.
#[derive(Debug)]
pub struct PreparedPrompt {
    /// The model's settings.
    pub config: LlamaConfig,
    tokens: Vec<u32>,
    tokenizer: Option<Tokenizer>,
}

/// Turns the prompt into tokens, and refuses what the model can never do, before any weight is read.
///
/// # Errors
/// Names the settings or the tokenizer that cannot be read, the token that is not in the vocabulary, or how many tokens
/// can be added at most.
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

/// Holds a prompt and the number of tokens to add against the model's settings.
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
            Prompt::Text(_) => "tokenizer.json beside it makes such tokens, and is of another model".into(),
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
    // The last token is chosen and never fed back, so that it needs no position.
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

/// Loads the model and generates from what [`prepare`] made of the same settings and request. Every rank calls this alike.
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
        ModelDType::F16 => Dtype::F16,
        ModelDType::Bf16 => Dtype::Bf16,
        ModelDType::F32 => Dtype::F32,
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
        // Once more, all positions at once: the same cache, the same sums. The last token has no successor.
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
        "cannot write --logits-out {}: {error}; name a file in a folder that is there and can be written",
        file.display()
    ))
}
