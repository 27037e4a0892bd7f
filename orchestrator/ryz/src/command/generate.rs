//! `ryz generate`

use std::io::{Read, Write as _};
use std::path::PathBuf;

use crate::generate::{self, PreparedPrompt, Prompt, Request, Response};
use anyhow::Context as _;
use clap::builder::NonEmptyStringValueParser;
use ryzanstein_benches::communication::{Communication, JobContext};
use ryzanstein_config::{ByteSize, ModelConfig, Source, WorldSize};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::hub;
use ryzanstein_orchestrator::rendezvous::Environment;
use ryzanstein_orchestrator::table;
use ryzanstein_process_group::{Error, ProcessGroupManager, Rank};
use ryzanstein_tensor_parallel::{Error as ModelError, Message, Penalties};

use crate::command::launch;
use crate::command::live_text::{Format, LiveText};
use crate::command::rank;
use crate::command::screen;
use crate::command::settings;

/// Headings of the help.
const SAMPLING: &str = "Sampling";
const OUTPUT: &str = "Output";
const RANKS: &str = "Ranks and devices";

#[derive(clap::Args, Clone, Debug)]
#[command(
    group(clap::ArgGroup::new("input").required(true).args(["prompt", "token_ids"])),
    after_help = "Examples:\n  \
        ryz generate --model models/llama --prompt \"The capital of France is\"\n  \
        ryz generate --model HuggingFaceTB/SmolLM2-135M-Instruct --chat --prompt \"Who are you?\"\n  \
        ryz generate --model models/llama -n 2 --prompt - --format json < prompt.txt"
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag")]
pub(crate) struct Args {
    /// Folder of the model in Hugging Face format, or org/name in the Hugging Face cache [default: the setting
    /// model.directory]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Prompt as text; - reads standard input
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Prompt as token ids
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    token_ids: Option<Vec<u32>>,
    /// Send the prompt as a chat message, using the model's chat template
    #[arg(long, conflicts_with = "token_ids")]
    chat: bool,
    /// With --chat: the system message before it
    #[arg(
        long,
        value_name = "TEXT",
        requires = "chat",
        conflicts_with = "token_ids",
        allow_hyphen_values = true
    )]
    system: Option<String>,
    /// Maximum number of tokens to generate [default: 32]
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<String>,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Sampling temperature; 0 always takes the likeliest token [default: 0]
    #[arg(long, value_name = "T", help_heading = SAMPLING)]
    temperature: Option<String>,
    /// Sample from the K likeliest tokens only; 0 means all [default: 0]
    #[arg(long, value_name = "K", help_heading = SAMPLING)]
    top_k: Option<String>,
    /// Sample from the likeliest tokens that together have this probability [default: 1]
    #[arg(long, value_name = "P", help_heading = SAMPLING)]
    top_p: Option<String>,
    /// Seed for sampling [default: 0]
    #[arg(long, value_name = "S", help_heading = SAMPLING)]
    seed: Option<String>,
    /// Divide the positive logits of tokens that have occurred by this, and multiply the others; 1 changes nothing
    #[arg(long, value_name = "X", default_value_t = 1.0, help_heading = SAMPLING)]
    repetition_penalty: f32,
    /// Subtract this from the logits of tokens that have been generated; from -2 to 2
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = SAMPLING)]
    presence_penalty: f32,
    /// Subtract this from the logits of generated tokens, once for each time; from -2 to 2
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = SAMPLING)]
    frequency_penalty: f32,
    /// Continue after the model's end tokens and stop strings
    #[arg(long)]
    ignore_end: bool,
    /// Stream text, or print one line of JSON at the end [default: text on a terminal, else json]
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = OUTPUT)]
    format: Option<Format>,
    /// Print a table of the collectives and their times at the end; calls in CUDA graphs are timed too, which slows them
    #[arg(long, help_heading = OUTPUT)]
    profile: bool,
    /// Write the logits of every position to this safetensors file
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    logits_out: Option<PathBuf>,
    /// Print the SHA-256 of these logits, as f32; with model.numerics = invariant, every legal number of ranks has the same
    #[arg(long, help_heading = OUTPUT)]
    logits_digest: bool,
    /// Type of activations: f32, f16 or bf16 [default: that of the weights]
    #[arg(long, value_name = "DTYPE", help_heading = RANKS)]
    dtype: Option<String>,
    /// On a GPU: launch every operation of every token instead of replaying a CUDA graph
    #[arg(long, help_heading = RANKS)]
    no_graph: bool,
    /// Backend: auto, nccl (on GPUs) or tcp (on CPUs) [default: auto]
    #[arg(long, value_name = "BACKEND", help_heading = RANKS)]
    backend: Option<String>,
    /// Number of ranks to start, when no launcher started this process [default: 1]
    #[arg(long, short = 'n', value_name = "N", help_heading = RANKS)]
    world_size: Option<String>,
    /// Pipeline stages that the layers are divided into; the ranks of each share its layers [default: 1]
    #[arg(long, value_name = "P", help_heading = RANKS)]
    pipeline_parallel: Option<String>,
    /// Only rank 0 reads the model's folder, and sends the others what they need
    #[arg(long, help_heading = RANKS)]
    load_from_root: bool,
    #[command(flatten)]
    file: settings::ConfigFile,
    /// File with the prompt that was read from standard input
    #[arg(long, hide = true, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
}

/// Upper bound of the size of a prompt: no model accepts a larger one.
const LARGEST_PROMPT: ByteSize = ByteSize::mib(256);

impl Args {
    /// Returns the prompt, and its text if that came from standard input.
    fn prompt(&self) -> anyhow::Result<(Prompt, Option<String>)> {
        let Some(text) = &self.prompt else {
            return Ok((Prompt::Tokens(self.token_ids.clone().unwrap_or_default()), None));
        };
        let mut from_stdin = None;
        let text = match (&self.prompt_file, text.as_str()) {
            (Some(file), _) => {
                std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?
            }
            (None, "-") => {
                let text = read_prompt(std::io::stdin(), LARGEST_PROMPT)?;
                from_stdin = Some(text.clone());
                text
            }
            (None, text) => text.to_owned(),
        };
        if !self.chat {
            return Ok((Prompt::Text(text), from_stdin));
        }
        let system = self.system.clone().map(Message::system);
        Ok((Prompt::Chat(system.into_iter().chain([Message::user(text)]).collect()), from_stdin))
    }

    fn flags(&self) -> settings::Flags {
        let mut flags = settings::Flags::new();
        let model = self.model.as_ref().map(|m| m.display());
        settings::set_flag(&mut flags, "model.directory", "--model", model);
        settings::set_flag(&mut flags, "model.dtype", "--dtype", self.dtype.as_ref());
        settings::set_flag(
            &mut flags,
            "model.max_new_tokens",
            "--max-new-tokens",
            self.max_new_tokens.as_ref(),
        );
        settings::set_flag(&mut flags, "model.temperature", "--temperature", self.temperature.as_ref());
        settings::set_flag(&mut flags, "model.top_k", "--top-k", self.top_k.as_ref());
        settings::set_flag(&mut flags, "model.top_p", "--top-p", self.top_p.as_ref());
        settings::set_flag(&mut flags, "model.seed", "--seed", self.seed.as_ref());
        settings::set_flag(&mut flags, "job.world_size", "--world-size", self.world_size.as_ref());
        let stages = self.pipeline_parallel.as_ref();
        settings::set_flag(&mut flags, "layout.pipeline_parallel", "--pipeline-parallel", stages);
        settings::set_flag(&mut flags, "model.graph", "--no-graph", self.no_graph.then_some("false"));
        settings::set_flag(&mut flags, "process_group.backend", "--backend", self.backend.as_ref());
        flags
    }
}

/// Reads a prompt of at most `limit`, without the mark before it and the line break after it that editors write.
fn read_prompt(input: impl Read, limit: ByteSize) -> anyhow::Result<String> {
    let wrong = |what: String| Error::Configuration(format!("--prompt -: standard input {what}"));
    let mut bytes = Vec::new();
    let mut input = input.take(limit.get() + 1);
    input.read_to_end(&mut bytes).context("--prompt -: cannot read standard input")?;
    if bytes.len() as u64 > limit.get() {
        return Err(wrong(format!("has more than {limit}, the most that is read; shorten the prompt")).into());
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let found = match error.as_bytes() {
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "is UTF-16".into(),
            _ => format!("is not UTF-8 text ({})", error.utf8_error()),
        };
        wrong(format!("{found}; save the prompt as UTF-8"))
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let text = text.strip_suffix('\n').map_or(text, |line| line.strip_suffix('\r').unwrap_or(line));
    if text.is_empty() {
        return Err(wrong("is empty; pipe the prompt in, or pass it as --prompt TEXT".into()).into());
    }
    Ok(text.into())
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let mut config = args.file.load(args.flags())?;
    settings::silence_slow_call_warnings(&mut config);
    if args.profile && config.source_of("profile.graphs") == Some(Source::Default) {
        config.profile.graphs = true;
    }
    screen.set_log_level(&mut config);
    let environment = settings::environment();
    let model =
        config.model.directory.as_ref().ok_or_else(|| {
            Error::Configuration("no model: pass --model DIR or set model.directory".into())
        })?;
    let (prompt, from_stdin) = args.prompt()?;
    let mut request = Request {
        model: model.clone(),
        load_from_root: args.load_from_root,
        prompt,
        logits_out: args.logits_out.clone(),
        logits_digest: args.logits_digest,
        ignore_end: args.ignore_end,
        stop: args.stop.clone(),
        penalties: Penalties {
            repetition: args.repetition_penalty,
            presence: args.presence_penalty,
            frequency: args.frequency_penalty,
        },
    };
    let is_launched = settings::is_launched(&config)?;
    // Refuse wrong requests before anything is started. If only rank 0 can, wait until this rank knows its number.
    let input = if is_launched && args.load_from_root {
        None
    } else {
        request.model = hub::resolve(model, &environment)?;
        let (model, input) = generate::prepare(&config.model, &request)?;
        if !is_launched {
            let ranks = config.job.world_size.map_or(1, WorldSize::get);
            generate::check_layout(&model, &config, ranks as usize)?;
            args.logits_out.as_deref().map_or(Ok(()), generate::check_logits_out)?;
            if ranks > 1 {
                return relaunch(ranks, args, from_stdin.as_deref());
            }
        }
        Some(input)
    };
    let stdout = screen.stdout();
    let format = args.format.unwrap_or(if screen::is_terminal() { Format::Text } else { Format::Json });
    rank::run(&config, |orchestrator| {
        let is_first = orchestrator.manager().rank() == Rank(0);
        let input = if let Some(input) = input {
            input
        } else {
            let prepared = is_first.then(|| prepare(&mut request, &config.model, &environment));
            generate::share(orchestrator, &request.model, prepared)?
        };
        let mut live = LiveText::start(is_first, format, stdout, &request.prompt);
        let response =
            generate::run(orchestrator, &config.model, &request, input, &mut |progress| live.tell(progress));
        let response = match response {
            Ok(response) => response,
            Err(error) => {
                live.fail();
                return Err(error.into());
            }
        };
        live.end(&response);
        if is_first && args.profile {
            let on_gpu = orchestrator.tensor_parallel().device().is_some();
            let profile = table::profile(&response.profile, on_gpu, screen.stderr());
            let told = communication(orchestrator, &response, screen);
            let gap = if told.is_empty() { "" } else { "\n" };
            screen::print_aside(&format!("\n{profile}{gap}{told}"));
        }
        Ok(())
    })
}

/// Returns the share of the passes that this rank spent communicating, with advice: a pass for the prompt, and one for each
/// token after the first. Empty for a single rank.
fn communication(orchestrator: &mut Orchestrator, response: &Response, screen: &screen::Args) -> String {
    let is_graph = orchestrator.config().model.graph;
    let manager = orchestrator.manager();
    let around = JobContext::of(manager, ProcessGroupManager::tensor_parallel, &response.profile, None);
    let seconds = (response.timings.prefill + response.timings.decode).as_secs_f64();
    Communication::new(&response.profile, seconds, response.tokens.len())
        .text(&JobContext { is_graph, ..around }, screen.stderr())
}

/// Prepares the prompt on rank 0 for all ranks.
fn prepare(
    request: &mut Request,
    settings: &ModelConfig,
    environment: &Environment,
) -> Result<PreparedPrompt, ModelError> {
    request.model =
        hub::resolve(&request.model, environment).map_err(|error| ModelError::Input(error.to_string()))?;
    generate::prepare(settings, request).map(|(_, prompt)| prompt)
}

/// Starts the ranks. They have no standard input, so a file passes its content on to them.
fn relaunch(ranks: u32, args: &Args, from_stdin: Option<&str>) -> anyhow::Result<i32> {
    let Some(text) = from_stdin else { return launch::relaunch(ranks, &args.file, &[], &[]) };
    let mut file = tempfile::NamedTempFile::new().context("cannot hand the prompt to the ranks")?;
    file.write_all(text.as_bytes()).context("cannot hand the prompt to the ranks")?;
    launch::relaunch(ranks, &args.file, &["--prompt-file".into(), file.path().into()], &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: ByteSize = ByteSize::bytes(8);

    #[test]
    fn a_prompt_on_standard_input_is_its_text_without_what_an_editor_adds() {
        for (input, prompt) in [
            ("hi", "hi"),
            ("hi\n", "hi"),
            ("hi\r\n", "hi"),
            ("hi\r", "hi\r"),
            ("\u{feff}hi\n\n", "hi\n"),
            ("a\r\nb\r\n", "a\r\nb"),
        ] {
            assert_eq!(read_prompt(input.as_bytes(), LIMIT).expect("a prompt"), prompt, "{input:?}");
        }
        for (input, words) in [
            (&b""[..], "is empty"),
            (b"\xef\xbb\xbf\r\n", "is empty"),
            (b"\xff\xfeh\0", "UTF-16; save the prompt as UTF-8"),
            (b"\xfe\xff\0h", "UTF-16; save the prompt as UTF-8"),
            (b"h\xff", "not UTF-8 text (invalid utf-8 sequence of 1 bytes from index 1)"),
            (b"123456789", "more than 8B"),
        ] {
            let error = read_prompt(input, LIMIT).expect_err("no prompt");
            assert!(error.is::<Error>() && error.to_string().contains(words), "{input:?}: {error}");
        }
    }
}
