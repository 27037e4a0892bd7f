//! `ryz generate`

use std::path::PathBuf;

use ryzanstein_config::WorldSize;
use ryzanstein_orchestrator::generate::{self, Prompt, Request};
use ryzanstein_process_group::Error;
use ryzanstein_tensor_parallel::check_world_size;

use crate::{launch, rank, settings};

#[derive(clap::Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("input").required(true).args(["prompt", "token_ids"])))]
pub(crate) struct Args {
    /// Folder of the model in Hugging Face format [default: the setting model.directory]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Prompt as text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Prompt as token ids
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    token_ids: Option<Vec<u32>>,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<String>,
    /// Write the logits of every position to this safetensors file
    #[arg(long, value_name = "FILE")]
    logits_out: Option<PathBuf>,
    /// Type of activations: f32, f16 or bf16 [default: that of the weights]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<String>,
    /// Sampling temperature; 0 always takes the likeliest token
    #[arg(long, value_name = "T")]
    temperature: Option<String>,
    /// Sample from the likeliest tokens that together have this probability
    #[arg(long, value_name = "P")]
    top_p: Option<String>,
    /// Seed for sampling
    #[arg(long, value_name = "S")]
    seed: Option<String>,
    /// Continue after the end-of-text token
    #[arg(long)]
    ignore_end: bool,
    /// On a GPU: launch every operation of every token instead of replaying a CUDA graph
    #[arg(long)]
    no_graph: bool,
    /// Backend: auto, nccl (on GPUs) or tcp (on CPUs)
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Number of ranks to start, when no launcher started this process
    #[arg(long, value_name = "N")]
    world_size: Option<String>,
    #[command(flatten)]
    file: settings::ConfigFile,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<i32> {
    let mut flags = settings::Flags::new();
    let model = args.model.as_ref().map(|m| m.display());
    settings::set_flag(&mut flags, "model.directory", "--model", model);
    settings::set_flag(&mut flags, "model.dtype", "--dtype", args.dtype.as_ref());
    settings::set_flag(&mut flags, "model.max_new_tokens", "--max-new-tokens", args.max_new_tokens.as_ref());
    settings::set_flag(&mut flags, "model.temperature", "--temperature", args.temperature.as_ref());
    settings::set_flag(&mut flags, "model.top_p", "--top-p", args.top_p.as_ref());
    settings::set_flag(&mut flags, "model.seed", "--seed", args.seed.as_ref());
    settings::set_flag(&mut flags, "job.world_size", "--world-size", args.world_size.as_ref());
    settings::set_flag(&mut flags, "model.graph", "--no-graph", args.no_graph.then_some("false"));
    settings::set_flag(&mut flags, "process_group.backend", "--backend", args.backend.as_ref());
    let config = args.file.load(flags)?;
    let model =
        config.model.directory.clone().ok_or_else(|| {
            Error::Configuration("no model: pass --model DIR or set model.directory".into())
        })?;

    let prompt = match (&args.prompt, &args.token_ids) {
        (Some(text), _) => Prompt::Text(text.clone()),
        (None, tokens) => Prompt::Tokens(tokens.clone().unwrap_or_default()),
    };
    let request = Request { model, prompt, logits_out: args.logits_out.clone(), ignore_end: args.ignore_end };
    // Refuse what is wrong before anything is started.
    let input = generate::prepare(&config.model, &request)?;
    if !settings::is_launched(&settings::environment()) {
        let ranks = config.job.world_size.map_or(1, WorldSize::get);
        check_world_size(&input.config, ranks as usize)?;
        args.logits_out.as_deref().map_or(Ok(()), generate::create_logits)?;
        if ranks > 1 {
            return launch::relaunch(ranks, &args.file);
        }
    }
    rank::run(&config, |orchestrator| {
        let response = generate::run(orchestrator, &config.model, &request, input)?;
        if orchestrator.manager().rank().0 == 0 {
            eprint!("{}", response.profile);
            println!("{}", response.json());
        }
        Ok(())
    })
}
