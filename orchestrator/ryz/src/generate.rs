//! `ryz generate`: text generation with a model that is divided over ranks.

use std::fmt::Write as _;
use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ryzanstein_config::{Config, ModelConfig, ModelDType};
use ryzanstein_process_group::{DType, Layout, ProfileRow, Rank};
use ryzanstein_tensor_parallel::{
    CacheSize, ChatTemplate, Error, GenerateOptions, Llama, LlamaConfig, LoadReport, Message, Passes,
    Penalties, RemoteError, Sampling, StopReason, Tensor, TextStream, Tokenizer, check_stages,
    check_world_size,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::render::render;
use ryzanstein_orchestrator::Orchestrator;

/// The prompt.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Text; the folder must have a `tokenizer.json`.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Messages, which the model's chat template turns into text.
    Chat(Vec<Message>),
}

/// A request for generation.
#[derive(Clone, Debug)]
pub struct Request {
    /// Folder of the model.
    pub model: PathBuf,
    /// True if rank 0 reads the folder for all. Otherwise every rank reads it.
    pub load_from_root: bool,
    /// The prompt.
    pub prompt: Prompt,
    /// File to which rank 0 writes the f32 logits `[positions, vocabulary]` of the prompt and the generated tokens, unpadded.
    pub logits_out: Option<PathBuf>,
    /// True to compute the digest of these logits.
    pub logits_digest: bool,
    /// True to continue after the end-of-text token and the model's own stop strings.
    pub ignore_end: bool,
    /// Stop strings, in addition to the model's own: the text ends before the first of these.
    pub stop: Vec<String>,
    /// Penalties for tokens that have occurred.
    pub penalties: Penalties,
}

/// Progress of a request.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// Number of tensors read so far, and number of all tensors.
    Loading(usize, usize),
    /// The model is loaded.
    Loaded,
    /// A new token, and the text that it completes; no text without a tokenizer.
    Token(u32, Option<&'a str>),
    /// The end of the text, which was withheld until generation stopped.
    Rest(&'a str),
}

/// Durations of the parts of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timings {
    /// Duration of loading the model, until every rank had its weights.
    pub load: Duration,
    /// Duration from the start of generation to the first token.
    pub prefill: Duration,
    /// Duration from the first token to the last.
    pub decode: Duration,
}

impl Timings {
    /// Returns the tokens per second after the first, for `tokens` tokens; `None` for fewer than two.
    pub fn tokens_per_second(&self, tokens: usize) -> Option<f64> {
        (tokens > 1 && !self.decode.is_zero()).then(|| (tokens - 1) as f64 / self.decode.as_secs_f64())
    }
}

/// The result.
#[derive(Clone, Debug)]
pub struct Response {
    /// Generated token ids, without the prompt.
    pub tokens: Vec<u32>,
    /// Text of the tokens, before the stop string, if there is a tokenizer.
    pub text: Option<String>,
    /// The reason for the end of generation.
    pub stop: StopReason,
    /// Load statistics of each rank, in rank order.
    pub loads: Vec<LoadReport>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Durations of the parts of the request.
    pub timings: Timings,
    /// The SHA-256 of the logits that `logits_out` gets, if it was requested.
    pub logits_digest: Option<String>,
    /// This rank's profile of the calls of its tensor- and pipeline-parallel groups.
    pub profile: Vec<ProfileRow>,
}

impl Response {
    /// Returns the one line that rank 0 prints on stdout.
    pub fn json(&self) -> Value {
        let mut line = json!({ "token_ids": self.tokens });
        if let Some(text) = &self.text {
            line["text"] = json!(text);
        }
        if let Some(digest) = &self.logits_digest {
            line["logits_sha256"] = json!(digest);
        }
        line["stop"] = json!(match self.stop {
            StopReason::Length => "length",
            StopReason::End(_) => "end_token",
            StopReason::Caller => "stop_text",
        });
        line["load"] = json!(self.loads);
        line["prompt_tokens"] = json!(self.prompt_tokens);
        let Timings { load, prefill, decode } = self.timings;
        line["seconds"] = json!({
            "load": load.as_secs_f64(),
            "prefill": prefill.as_secs_f64(),
            "decode": decode.as_secs_f64(),
        });
        line["tokens_per_second"] = json!(self.timings.tokens_per_second(self.tokens.len()));
        line
    }
}

/// Refuses a file for the logits that cannot be written, before a model is loaded. The contents of the file stay.
///
/// # Errors
/// [`Error::Input`] names the file.
pub fn check_logits_out(file: &Path) -> Result<(), Error> {
    let opened = File::options().write(true).create(true).truncate(false).open(file);
    opened.map(drop).map_err(|error| cannot_write(file, &error))
}

/// Refuses a layout that cannot divide the model, before a rank is started.
///
/// # Errors
/// Names the sizes that do not divide, and valid values.
pub fn check_layout(model: &LlamaConfig, settings: &Config, ranks: usize) -> Result<(), Error> {
    let layout = Layout::new(&settings.layout, ranks)?;
    check_world_size(model, layout.tensor_parallel, settings.model.numerics)?;
    check_stages(model, layout.pipeline_parallel)
}

/// A checked prompt, and the tokenizer if the folder has one.
#[derive(Debug)]
pub struct PreparedPrompt {
    tokens: Vec<u32>,
    tokenizer: Option<Tokenizer>,
}

/// Encodes the prompt, and refuses requests beyond the model's limits, before any weight is read. Also returns the model's
/// settings.
///
/// # Errors
/// Names the settings, the tokenizer or the chat template that cannot be read, the token outside the vocabulary, the penalty
/// out of its range, or the maximum number of new tokens.
pub fn prepare(settings: &ModelConfig, request: &Request) -> Result<(LlamaConfig, PreparedPrompt), Error> {
    let config = LlamaConfig::from_folder(&request.model)?;
    let tokenizer = Tokenizer::open(&request.model)?;
    let tokens = encode(request, tokenizer.as_ref())?;
    request.penalties.check()?;
    if tokenizer.is_none() && !request.stop.is_empty() {
        return Err(Error::Input(format!(
            "--stop needs a tokenizer, and {} has no tokenizer.json; omit --stop",
            request.model.display()
        )));
    }
    if tokenizer.is_none() && !request.ignore_end && !config.stop_strings.is_empty() {
        return Err(Error::Input(format!(
            "`stop_strings` of {0}/generation_config.json or config.json needs a tokenizer, and {0} has no tokenizer.json; remove the \
             key, or pass --ignore-end",
            request.model.display()
        )));
    }
    check_prompt(&config, request, &tokens, settings.max_new_tokens as usize)?;
    Ok((config, PreparedPrompt { tokens, tokenizer }))
}

/// The part of a prompt that other ranks need from rank 0, which has prepared it.
#[derive(Serialize, Deserialize)]
struct SharedPrompt {
    tokens: Vec<u32>,
    /// Contents of the tokenizer's file.
    tokenizer: Option<Vec<u8>>,
}

/// Gives every rank the prompt that rank 0 has prepared, or its error. `prepared` is `Some` there, and ignored elsewhere.
///
/// # Errors
/// Returns the error of rank 0, and those of the collectives.
pub fn share(
    orchestrator: &mut Orchestrator,
    folder: &Path,
    prepared: Option<Result<PreparedPrompt, Error>>,
) -> Result<PreparedPrompt, Error> {
    let mine = prepared.map(|prompt| Ok((prompt?, Tokenizer::read(folder)?)));
    let told = mine.as_ref().map(|mine| match mine {
        Ok((PreparedPrompt { tokens, .. }, tokenizer)) => {
            Ok(SharedPrompt { tokens: tokens.clone(), tokenizer: tokenizer.clone() })
        }
        Err(error) => Err(RemoteError::from(error)),
    });
    let root = Rank(0);
    let told: Result<SharedPrompt, RemoteError> =
        orchestrator.manager().world().broadcast_object(told.as_ref(), root)?;
    if let Some(mine) = mine {
        return mine.map(|(prompt, _)| prompt);
    }
    let SharedPrompt { tokens, tokenizer } = told.map_err(|source| Error::Peer { rank: root, source })?;
    let parse = |file| Tokenizer::from_bytes(Path::new("tokenizer.json"), file);
    Ok(PreparedPrompt { tokens, tokenizer: tokenizer.map(parse).transpose()? })
}

/// Returns the tokens of the prompt.
fn encode(request: &Request, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>, Error> {
    match (&request.prompt, tokenizer) {
        (Prompt::Tokens(tokens), _) => Ok(tokens.clone()),
        (Prompt::Text(text), Some(tokenizer)) => tokenizer.encode(text),
        (Prompt::Chat(messages), Some(tokenizer)) => {
            let template = ChatTemplate::open(&request.model)?;
            let tokens = tokenizer.encode_raw(&render(&template, messages)?)?;
            if tokens.is_empty() {
                return Err(Error::Input(format!(
                    "the chat template of {} renders a prompt without tokens; mend it, or omit --chat",
                    template.file().display()
                )));
            }
            Ok(tokens)
        }
        (Prompt::Text(_) | Prompt::Chat(_), None) => Err(Error::Input(format!(
            "a prompt in words needs a tokenizer, and {} has no tokenizer.json; give --token-ids instead",
            request.model.display()
        ))),
    }
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
            Prompt::Text(_) | Prompt::Chat(_) => {
                "the tokenizer.json next to it produces such tokens, so it belongs to another model".into()
            }
        };
        return Err(Error::Input(format!(
            "token {token} is not in the vocabulary of {vocabulary} (`vocab_size` of {file}); {remedy}"
        )));
    }
    if length > most {
        return Err(Error::Input(format!(
            "the prompt has {length} tokens, and the model takes {most} (`max_position_embeddings` and rope scaling of \
             {file}); shorten the prompt"
        )));
    }
    // The last token is never fed back, so it needs no position.
    let room = most - length + 1;
    if more > room {
        return Err(Error::Input(format!(
            "--max-new-tokens {more} behind a prompt of {length} tokens needs {} positions, and the model has {most} \
             (`max_position_embeddings` and rope scaling of {file}); ask for at most --max-new-tokens {room}, or shorten the prompt",
            length + more - 1
        )));
    }
    Ok(())
}

/// Returns the element type that a setting names.
pub const fn element_type(dtype: ModelDType) -> DType {
    match dtype {
        ModelDType::F16 => DType::F16,
        ModelDType::Bf16 => DType::BF16,
        ModelDType::F32 => DType::F32,
    }
}

/// Loads the model and generates from the result of [`prepare`] or [`share`] for the same settings and request. Every rank
/// calls this. `tell` gets the progress of this rank.
///
/// # Errors
/// Returns the errors of the model and of the collectives, and an error when `logits_out` cannot be written.
pub fn run(
    orchestrator: &mut Orchestrator,
    settings: &ModelConfig,
    request: &Request,
    input: PreparedPrompt,
    tell: &mut dyn FnMut(Progress<'_>),
) -> Result<Response, Error> {
    let started = Instant::now();
    let PreparedPrompt { tokens: mut prompt, tokenizer } = input;
    let manager = orchestrator.manager();
    let is_first = manager.rank() == Rank(0);
    if let Some(file) = request.logits_out.as_deref().filter(|_| is_first) {
        check_logits_out(file)?;
    }
    let dtype = settings.dtype.map(element_type);
    let mut timings = Timings::default();
    if matches!(request.prompt, Prompt::Chat(_)) {
        // A template may contain the time, and every rank must use the same prompt.
        prompt = manager.world().broadcast_object(Some(&prompt), Rank(0))?;
    }
    let model = if request.load_from_root {
        let folder = is_first.then_some(request.model.as_path());
        Llama::load_from_root(folder, dtype, Rank(0), manager)?
    } else {
        let on_tensor = |read, all| tell(Progress::Loading(read, all));
        Llama::load_with(&request.model, dtype, manager, on_tensor)?
    };
    timings.load = started.elapsed();
    tell(Progress::Loaded);
    let sampling = if settings.temperature.get() == 0.0 {
        Sampling::Greedy
    } else {
        Sampling::Random {
            temperature: settings.temperature.get().into(),
            top_p: settings.top_p.get().into(),
            top_k: NonZeroUsize::new(settings.top_k as usize),
            seed: settings.seed,
        }
    };
    let options = GenerateOptions {
        max_new_tokens: settings.max_new_tokens as usize,
        sampling,
        penalties: request.penalties,
        ignore_end: request.ignore_end,
        passes: if settings.graph { Passes::Graph } else { Passes::Eager },
    };
    let loads = manager.world().all_gather_object(model.report())?;
    let mut profiles = vec![manager.tensor_parallel().profile()];
    if model.stage().count > 1 {
        profiles.push(manager.pipeline_parallel().profile());
    }
    for profile in &profiles {
        profile.clear();
    }
    // Every rank decodes the text, because all must end at the same stop string.
    let mut stop = request.stop.clone();
    if !request.ignore_end {
        stop.extend_from_slice(&model.config().stop_strings);
    }
    let mut text = tokenizer.as_ref().map(|tokenizer| TextStream::new(tokenizer, &prompt, &stop));
    let (mut answer, mut failed) = (String::new(), None);
    let (began, mut first) = (Instant::now(), None);
    let generated = model.generate_with(&prompt, &options, manager, |token| {
        first.get_or_insert_with(Instant::now);
        let Some(text) = &mut text else {
            tell(Progress::Token(token, None));
            return ControlFlow::Continue(());
        };
        match text.push(token) {
            Ok(new) => {
                tell(Progress::Token(token, Some(&new)));
                answer += &new;
            }
            Err(error) => failed = Some(error),
        }
        if text.is_ended() || failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    let first = first.unwrap_or(began);
    (timings.prefill, timings.decode) = (first - began, first.elapsed());
    if let Some(text) = text {
        let rest = text.finish()?;
        tell(Progress::Rest(&rest));
        answer += &rest;
    }
    let profile = profiles.iter().flat_map(|profile| profile.rows()).collect();
    let mut digest = None;
    if request.logits_out.is_some() || request.logits_digest {
        // Once more, all positions at once: the same cache, the same sums. The last token is not an input.
        let mut all = prompt.clone();
        all.extend(&generated.tokens);
        all.truncate(prompt.len() + generated.tokens.len().saturating_sub(1));
        let mut decoder = Arc::new(model).decoder(CacheSize::full(1, all.len()), Passes::Eager)?;
        let logits = decoder.logits(0, &all, manager)?;
        digest = (is_first && request.logits_digest)
            .then(|| logits.values().map(|values| logits_digest(&values)))
            .transpose()?;
        if let Some(file) = request.logits_out.as_deref().filter(|_| is_first) {
            write_logits(file, logits)?;
        }
    }
    Ok(Response {
        logits_digest: digest,
        text: tokenizer.is_some().then_some(answer),
        stop: generated.stop,
        loads,
        prompt_tokens: prompt.len(),
        timings,
        profile,
        tokens: generated.tokens,
    })
}

/// Returns the SHA-256 of logits, as `f32` in little-endian bytes, in hexadecimal digits.
pub fn logits_digest(logits: &[f32]) -> String {
    let mut hash = Sha256::new();
    for logit in logits {
        hash.update(logit.to_le_bytes());
    }
    hash.finalize().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
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
