//! `ryz config`

use std::fmt::Write as _;

use ryzanstein_config::Config;
use ryzanstein_config::nccl::{self, NcclVariable};
use ryzanstein_orchestrator::nccl_settings;
use ryzanstein_orchestrator::table::{self, Cell, Column, Screen, Tone};
use serde_json::json;

use crate::command::screen;
use crate::command::settings;

pub(crate) const EXAMPLES: &str = "Examples:
  ryz config show
  RYZ_NCCL__PROFILE=inference ryz config show --format json
  ryz config show --format toml > ryzanstein.toml";

#[derive(clap::Subcommand, Clone, Debug)]
pub(crate) enum Command {
    /// List every setting and every NCCL variable with its value and source
    #[command(after_help = EXAMPLES)]
    Show {
        #[command(flatten)]
        file: settings::ConfigFile,
        /// A table, one object of JSON, or a configuration file
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
    },
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Table,
    Json,
    Toml,
}

pub(crate) fn run(command: &Command, screen: &screen::Args) -> anyhow::Result<i32> {
    let Command::Show { file, format } = command;
    let config = file.load(Vec::new())?;
    let variables = nccl::plan(&config, &nccl_settings::user_variables(&settings::environment()));
    let text = match format {
        Format::Table => table(&config, &variables, screen.stdout()),
        Format::Json => format!("{}\n", json(&config, &variables)),
        Format::Toml => toml(&config),
    };
    screen::print(&text);
    Ok(0)
}

fn table(config: &Config, variables: &[NcclVariable], screen: Screen) -> String {
    let settings = config.entries().into_iter().map(|entry| {
        vec![entry.key.into(), entry.value.into(), Cell::new(entry.source.to_string(), Tone::Faint)]
    });
    let of_nccl = variables.iter().map(|variable| {
        vec![
            variable.name.as_str().into(),
            variable.value.as_str().into(),
            Cell::new(describe(variable), Tone::Faint),
        ]
    });
    let rows: Vec<Vec<Cell>> = settings.chain(of_nccl).collect();
    let columns = [Column::left("key"), Column::left("value"), Column::left("source").drop_priority(1)];
    table::table(&columns, &rows, screen)
}

fn json(config: &Config, variables: &[NcclVariable]) -> serde_json::Value {
    let entry =
        |key: &str, value: &str, source: String| json!({ "key": key, "value": value, "source": source });
    let settings = config.entries();
    let settings: Vec<_> = settings.iter().map(|e| entry(e.key, &e.value, e.source.to_string())).collect();
    let variables: Vec<_> =
        variables.iter().map(|v| entry(&v.name, &v.value, v.source.to_string())).collect();
    json!({ "settings": settings, "nccl_variables": variables })
}

/// Formats a file that gives this configuration; settings without a value are comments.
fn toml(config: &Config) -> String {
    let (mut text, mut section) = (String::new(), "");
    for entry in config.entries() {
        if entry.key == "nccl.env" {
            let _ = writeln!(text, "\n[{}]", entry.key);
            for (name, value) in config.nccl.env.iter() {
                let _ = writeln!(text, "{name} = {}", json!(value));
            }
            continue;
        }
        let (in_section, name) = entry.key.rsplit_once('.').unwrap_or(("", entry.key));
        if in_section != section {
            let gap = if section.is_empty() { "" } else { "\n" };
            let _ = writeln!(text, "{gap}[{in_section}]");
            section = in_section;
        }
        let value = &entry.value;
        let _ = if value.is_empty() {
            writeln!(text, "# {name} =")
        } else if is_bare(value) {
            writeln!(text, "{name} = {value}")
        } else {
            // A string of JSON is one of TOML.
            writeln!(text, "{name} = {}", json!(value))
        };
    }
    text
}

/// Returns true if TOML reads this text as a boolean or an integer that is written the same again; `007` is neither.
fn is_bare(value: &str) -> bool {
    value.parse::<bool>().is_ok() || value.parse().is_ok_and(|number: i64| number.to_string() == value)
}

/// Describes the source of an NCCL variable, the value that it overrides, and advice about it.
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
