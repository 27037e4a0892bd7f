//! `ryz tune --nccl`

use std::fmt::Write as _;

use crate::doctor;
use crate::generate::element_type;
use crate::topo::Preset;
use crate::tune::{self, Proposal, Situation};
use anyhow::bail;
use ryzanstein_config::nccl;
use ryzanstein_config::{Config, Source};
use ryzanstein_orchestrator::hub;
use ryzanstein_orchestrator::nccl_settings;
use ryzanstein_orchestrator::table::{Screen, wrap};
use ryzanstein_process_group::{DType, Error, units};
use ryzanstein_tensor_parallel::LlamaConfig;
use serde_json::{Value, json};

use crate::command::screen;
use crate::command::settings;
use crate::command::tune_args::Args;

/// The reason why nothing is proposed for one node.
const OWN_KERNELS: &str = "Kernels of ryz carry these all-reduces between GPUs that NVLink connects, so settings of NCCL do not change \
                           their time. To let NCCL carry them: process_group.peer_memory = false.";

/// The changes of a proposal: name of a variable, value before and value after.
type Changes = Vec<(String, Option<String>, Option<String>)>;

/// The proposals and their context.
struct Found {
    /// Bytes of the all-reduce that counts, if known.
    message: Option<u64>,
    /// True if our own kernels carry that all-reduce.
    is_own: bool,
    effective: Vec<(Proposal, Changes)>,
    /// Proposals that one of the user's variables makes ineffective.
    overruled: Vec<Proposal>,
}

fn flags(args: &Args) -> settings::Flags {
    let mut flags = settings::Flags::new();
    settings::set_flag(&mut flags, "job.world_size", "--world-size", args.world_size.as_ref());
    settings::set_flag(&mut flags, "launch.nnodes", "--nnodes", args.nnodes.as_ref());
    settings::set_flag(&mut flags, "model.directory", "--model", args.model.as_ref().map(|m| m.display()));
    flags
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let config = args.file.load(flags(args))?;
    let hardware = args.preset.map_or_else(doctor::hardware, Preset::hardware);
    match &hardware.driver {
        Ok(driver) if driver.gpus.is_empty() => bail!(no_gpus("the driver lists none")),
        Ok(_) => {}
        Err(why) => bail!(no_gpus(why)),
    }
    let message = message(args, &config)?;
    let situation = Situation { hardware: &hardware, nodes: config.launch.nnodes.get(), message };
    let proposals = tune::propose(&situation, &config);
    let is_own = tune::own_kernels_carry(&situation, &config);
    let own = nccl_settings::user_variables(&settings::environment());
    let before = nccl::plan(&config, &own);
    let mut found = Found { message, is_own, effective: Vec::new(), overruled: Vec::new() };
    for proposal in proposals {
        let after = nccl::plan(&proposal.apply(config.clone())?, &own);
        // A variable or flag replaces the whole table of the file.
        let is_replaced = proposal.is_variable()
            && !matches!(config.source_of("nccl.env"), Some(Source::Default | Source::File(_)));
        match tune::changes(&before, &after) {
            none if none.is_empty() || is_replaced => found.overruled.push(proposal),
            changes => found.effective.push((proposal, changes)),
        }
    }
    screen.show(args.format, &as_json(&found), |screen| as_text(&found, screen));
    Ok(0)
}

fn no_gpus(why: &str) -> Error {
    Error::Configuration(format!(
        "there are no GPUs here, so NCCL has nothing to do: {why}; `ryz tune -n N` measures paths on CPUs, and --preset shows a \
         made-up machine"
    ))
}

/// Returns the bytes of the all-reduce of a decode step, or those that the user gives.
fn message(args: &Args, config: &Config) -> anyhow::Result<Option<u64>> {
    if let Some(bytes) = args.bytes {
        if bytes.get() == 0 {
            return Err(Error::Configuration(
                "--bytes 0: an all-reduce has at least one byte; pass a size above 0".into(),
            )
            .into());
        }
        return Ok(Some(bytes.get()));
    }
    let Some(named) = &config.model.directory else { return Ok(None) };
    let model = LlamaConfig::from_folder(&hub::resolve(named, &settings::environment())?)?;
    let dtype = config.model.dtype.map(element_type).or(model.stored_dtype);
    let bytes = dtype.map_or(4, DType::size) * model.hidden;
    Ok(Some(bytes as u64 * args.batch.map_or(1, |batch| u64::from(batch.get()))))
}

fn as_json(found: &Found) -> Value {
    let proposals = found.effective.iter().map(|(Proposal { key, value, reason }, changes)| {
        let variables = changes
            .iter()
            .map(|(name, before, after)| json!({ "name": name, "before": before, "after": after }));
        json!({ "key": key, "value": value, "reason": reason, "variables": variables.collect::<Vec<_>>() })
    });
    json!({
        "own_kernels": found.is_own,
        "proposals": proposals.collect::<Vec<_>>(),
    })
}

fn as_text(found: &Found, screen: Screen) -> String {
    let mut text = match found.message {
        Some(bytes) => format!("For all-reduces of {}:\n", units::bytes(bytes as f64)),
        None => "The message size is unknown: pass --model DIR or --bytes SIZE.\n".into(),
    };
    if found.is_own {
        let _ = writeln!(text, "{}", wrap(OWN_KERNELS, 2, screen));
    }
    for (Proposal { key, value, reason }, changes) in &found.effective {
        let _ = writeln!(text, "{key} = {value:?}\n  {}", wrap(reason, 2, screen));
        for (name, before, after) in changes {
            for (mark, value) in [('-', before), ('+', after)] {
                if let Some(value) = value {
                    let _ = writeln!(text, "  {mark} {name}={value}");
                }
            }
        }
    }
    for Proposal { key, value, .. } in &found.overruled {
        let line = format!("{key} = {value} has no effect: one of your variables overrides it");
        let _ = writeln!(text, "{}", wrap(&line, 2, screen));
    }
    if found.effective.is_empty() {
        text += "nothing to propose\n";
    } else {
        text += "none of this was measured (ryz bench --vary algorithm or protocol does); to use a proposal, write it into the \
                 configuration file\n";
    }
    text
}
