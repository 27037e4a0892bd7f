//! `ryz generate`

use std::path::PathBuf;

use anyhow::bail;

use crate::settings;

#[derive(clap::Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("input").required(true).args(["prompt", "token_ids"])))]
pub(crate) struct Args {
    /// The folder of the model, as on Hugging Face
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
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
    /// What weights are held in: f32, f16 or bf16
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<String>,
    /// Without a launcher: how many ranks to start
    #[arg(long, value_name = "N")]
    world_size: Option<String>,
    #[command(flatten)]
    file: settings::File,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<i32> {
    let mut flags = settings::Flags::new();
    settings::note(&mut flags, "model.dtype", "--dtype", args.dtype.as_ref());
    settings::note(&mut flags, "model.max_new_tokens", "--max-new-tokens", args.max_new_tokens.as_ref());
    settings::note(&mut flags, "job.world_size", "--world-size", args.world_size.as_ref());
    let _config = args.file.load(flags)?;
    if !args.model.is_dir() {
        bail!("--model: {} is no folder", args.model.display());
    }
    let _ = (&args.prompt, &args.token_ids, &args.logits_out);
    bail!("this build has no model to generate with")
}
