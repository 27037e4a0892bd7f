//! The flags of `ryz tune`.

use std::num::NonZeroU32;
use std::path::PathBuf;

use crate::topo::Preset;
use ryzanstein_config::ByteSize;

use crate::command::screen;
use crate::command::settings;

const EXAMPLES: &str = "Examples:
  ryz tune -n 4
  ryz tune -n 4 --apply
  ryz tune -n 2 --op all_reduce,all_gather --sizes 4KB,64KB,1MB --out paths.json
  ryz tune --nccl --preset dgx-h100 --nnodes 2 --model models/llama";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Number of ranks to start, when no launcher started this process
    #[arg(long, short = 'n', value_name = "N")]
    pub(crate) world_size: Option<String>,
    /// Backend of the collectives: auto, nccl (on GPUs) or tcp (on CPUs) [default: auto]
    #[arg(long, value_name = "BACKEND", conflicts_with = "nccl")]
    pub(crate) backend: Option<String>,
    /// Operations separated by commas, or all
    #[arg(long, value_name = "OP,…", default_value = "all", conflicts_with = "nccl")]
    pub(crate) op: String,
    /// Sizes of the whole array, separated by commas [default: 1KB to 16MB, each 4 times the one before]
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', conflicts_with = "nccl")]
    pub(crate) sizes: Option<Vec<ByteSize>>,
    /// Write the table of paths for this user
    #[arg(long, conflicts_with = "nccl")]
    pub(crate) apply: bool,
    /// Write the table of paths to this file, which the setting process_group.tuning may name
    #[arg(long, value_name = "FILE", conflicts_with_all = ["apply", "nccl"])]
    pub(crate) out: Option<PathBuf>,
    /// Propose settings of NCCL in place of measuring paths
    #[arg(long)]
    pub(crate) nccl: bool,
    /// With --nccl: folder of the model whose decoding counts, or org/name in the Hugging Face cache
    #[arg(long, value_name = "DIR", requires = "nccl", conflicts_with = "bytes")]
    pub(crate) model: Option<PathBuf>,
    /// With --nccl: bytes of the all-reduce that counts, in place of a model
    #[arg(long, value_name = "SIZE", requires = "nccl")]
    pub(crate) bytes: Option<ByteSize>,
    /// With --nccl: sequences that are decoded at the same time [default: 1]
    #[arg(long, value_name = "B", requires = "model")]
    pub(crate) batch: Option<NonZeroU32>,
    /// With --nccl: number of nodes, all like this one [default: 1]
    #[arg(long, value_name = "M", requires = "nccl")]
    pub(crate) nnodes: Option<String>,
    /// With --nccl: a made-up machine in place of this one
    #[arg(long, value_name = "NAME", requires = "nccl")]
    pub(crate) preset: Option<Preset>,
    /// Tables, or one object of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    pub(crate) format: screen::Format,
    #[command(flatten)]
    pub(crate) file: settings::ConfigFile,
}
