//! `ryz plan`

use std::num::NonZeroUsize;
use std::path::PathBuf;

use crate::generate::element_type;
use crate::interconnect::Interconnect;
use crate::plan;
use ryzanstein_config::{ByteSize, WorldSize};
use ryzanstein_orchestrator::hub;
use ryzanstein_process_group::Error;
use ryzanstein_process_group::nvml::Nvml;
use ryzanstein_tensor_parallel::LlamaConfig;

use crate::command::screen;
use crate::command::settings;

const EXAMPLES: &str = "Examples:
  ryz plan --model models/llama --memory 80GiB
  ryz plan --model meta-llama/Llama-3.1-70B --memory 141GB --batch 16 --context 8192
  ryz plan --model models/llama -n 16 --interconnect ndr --format json";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Folder of the model with its config.json, or org/name in the Hugging Face cache [default: the setting model.directory]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Plan for this number of GPUs, in addition to 1 to 8
    #[arg(long, short = 'n', value_name = "N")]
    world_size: Option<String>,
    /// Sequences that are decoded at the same time
    #[arg(long, value_name = "B", default_value = "1")]
    batch: NonZeroUsize,
    /// Positions of each sequence [default: as many as the model has]
    #[arg(long, value_name = "C")]
    context: Option<NonZeroUsize>,
    /// Type of activations and weights: f32, f16 or bf16 [default: that of the stored weights]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<String>,
    /// Memory of one GPU [default: that of the smallest GPU of this machine, if there are GPUs]
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Interconnect of the GPUs: pcie3 to pcie5, nvlink2 to nvlink5, hdr, ndr, 10gbe, 25gbe or 100gbe
    #[arg(long, value_name = "NAME", default_value_t = Interconnect::NVLINK4)]
    interconnect: Interconnect,
    /// Report as a table, or as one line of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
    #[command(flatten)]
    file: settings::ConfigFile,
}

impl Args {
    fn flags(&self) -> settings::Flags {
        let mut flags = settings::Flags::new();
        let model = self.model.as_ref().map(|m| m.display());
        settings::set_flag(&mut flags, "model.directory", "--model", model);
        settings::set_flag(&mut flags, "model.dtype", "--dtype", self.dtype.as_ref());
        settings::set_flag(&mut flags, "job.world_size", "--world-size", self.world_size.as_ref());
        flags
    }
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let config = args.file.load(args.flags())?;
    let named =
        config.model.directory.as_ref().ok_or_else(|| {
            Error::Configuration("no model: pass --model DIR or set model.directory".into())
        })?;
    let model = LlamaConfig::from_folder(&hub::resolve(named, &settings::environment())?)?;
    let request = plan::Request {
        model: named.display().to_string(),
        world_size: config.job.world_size.map(|n| WorldSize::get(n) as usize),
        batch: args.batch.get(),
        context: args.context.map(NonZeroUsize::get),
        dtype: config.model.dtype.map(element_type),
        memory: args.memory.map(ByteSize::get).or_else(smallest_gpu),
        memory_fraction: f64::from(config.device.memory_fraction.get()),
        interconnect: args.interconnect,
        numerics: config.model.numerics,
    };
    let plan = plan::plan(&model, &request)?;
    screen.show(args.format, &plan, |screen| plan.table(screen));
    Ok(0)
}

/// Returns the bytes of the smallest memory of this machine's GPUs. A machine without GPUs is no error.
fn smallest_gpu() -> Option<u64> {
    Nvml::open().ok()?.gpus().ok()?.iter().map(|gpu| gpu.memory_bytes).min()
}
