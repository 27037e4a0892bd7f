//! `ryz config`

use std::io::Write as _;

use ryzanstein_config::nccl::{self, NcclVariable};
use ryzanstein_orchestrator::nccl_settings;

use crate::settings;

#[derive(clap::Subcommand, Clone, Debug)]
pub(crate) enum Command {
    /// List every setting and every NCCL variable with its value and source
    Show {
        #[command(flatten)]
        file: settings::ConfigFile,
    },
}

pub(crate) fn run(command: &Command) -> anyhow::Result<i32> {
    let Command::Show { file } = command;
    let config = file.load(Vec::new())?;
    let settings = config
        .entries()
        .into_iter()
        .map(|entry| (entry.key.to_owned(), entry.value, entry.source.to_string()));
    let of_nccl =
        nccl::plan(&config, &nccl_settings::user_variables(&settings::environment())).into_iter().map(|v| {
            let text = describe(&v);
            (v.name, v.value, text)
        });
    let rows: Vec<_> = settings.chain(of_nccl).collect();
    let key = rows.iter().map(|(key, ..)| key.len()).max().unwrap_or(0);
    let value = rows.iter().map(|(_, value, _)| value.chars().count()).max().unwrap_or(0);
    let mut out = std::io::stdout().lock();
    for (name, text, source) in &rows {
        // A reader that stops early, such as `head`, is no error.
        if writeln!(out, "{name:key$}  {text:value$}  {source}").is_err() {
            break;
        }
    }
    Ok(0)
}

/// The source of an NCCL variable, what it overrides, and advice about it.
fn describe(variable: &NcclVariable) -> String {
    let mut text = variable.source.to_string();
    if let Some((value, source)) = &variable.overridden {
        text = format!("{text}; overrides {value} of {source}");
    }
    if let Some(advice) = nccl::advice(&variable.name) {
        text = format!("{text}; {}: {}", advice.what, advice.instead);
    }
    text
}
