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
    /// The folder of the model, as on Hugging Face; without it, model.directory of the settings
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// What to go on from, as text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// What to go on from, as token ids
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    token_ids: Option<Vec<u32>>,
    /// How many tokens to add at most
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<String>,
    /// Write the logits of every position to this safetensors file
    #[arg(long, value_name = "FILE")]
    logits_out: Option<PathBuf>,
    /// The type of activations: f32, f16 or bf16; without it, that of the weights
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<String>,
    /// Choose at random, the flatter the higher; 0 takes the likeliest token
    #[arg(long, value_name = "T")]
    temperature: Option<String>,
    /// Choose at random among the likeliest tokens that together have this probability
    #[arg(long, value_name = "P")]
    top_p: Option<String>,
    /// What the choice at random starts from
    #[arg(long, value_name = "S")]
    seed: Option<String>,
    /// Go on behind the token that ends a text
    #[arg(long)]
    ignore_end: bool,
    /// On a GPU: launch every operation of every token, in place of repeating a recorded graph
    #[arg(long)]
    no_graph: bool,
    /// What carries and computes: auto, nccl (on GPUs) or tcp (on processors)
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Without a launcher: how many ranks to start
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
    let model = config.model.directory.clone().ok_or_else(|| {
        Error::Configuration("which model? Say it with --model DIR, or set model.directory".into())
    })?;

    let prompt = match (&args.prompt, &args.token_ids) {
        (Some(text), _) => Prompt::Text(text.clone()),
        (None, tokens) => Prompt::Tokens(tokens.clone().unwrap_or_default()),
    };
    let request = Request { model, prompt, logits_out: args.logits_out.clone(), ignore_end: args.ignore_end };
    // What can be refused is refused before anything is started.
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
