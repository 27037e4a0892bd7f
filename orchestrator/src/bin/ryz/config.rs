//! `ryz config`

use std::io::Write as _;

use crate::settings;

#[derive(clap::Subcommand, Clone, Debug)]
pub(crate) enum Command {
    /// Every setting, its value, and where that came from
    Show {
        #[command(flatten)]
        file: settings::File,
    },
}

pub(crate) fn run(command: &Command) -> anyhow::Result<i32> {
    let Command::Show { file } = command;
    let entries = file.load(Vec::new())?.entries();
    let key = entries.iter().map(|entry| entry.key.len()).max().unwrap_or(0);
    let value = entries.iter().map(|entry| entry.value.chars().count()).max().unwrap_or(0);
    let mut out = std::io::stdout().lock();
    for entry in &entries {
        // A reader that has seen enough, such as `head`, is no error.
        if writeln!(out, "{:key$}  {:value$}  {}", entry.key, entry.value, entry.source).is_err() {
            break;
        }
    }
    Ok(0)
}
