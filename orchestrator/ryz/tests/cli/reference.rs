//! The book's page on the command line is written from the definitions of the commands.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use clap::{Arg, Command};

const HEAD: &str = "# Command line

<!-- Written from the definitions of the commands: do not edit. To renew it: UPDATE=1 cargo test -p ryz --test cli reference -->

All ranks of a job must run the same version. Flags that correspond to a [setting](configuration.md) take the same values, and override
the environment and the file. Sizes: `KB MB GB` are powers of 1000, `KiB MiB GiB` of 1024.
";

const TAIL: &str = "
## Exit codes

| code | meaning |
|---|---|
| 0 | success; `ryz doctor`: healthy |
| 1 | failure: the network, another rank, a wrong value; `ryz doctor`: warnings; `ryz status`: no such job; `ryz explain`: an unknown error |
| 2 | wrong use: flags, settings, ranks that do not fit together, a model that is missing, damaged or unsupported. The same command would fail again, so a launcher does not restart it. `ryz doctor`: something is broken |
| *that of a rank* | `ryz launch`: the code of the rank that failed first |
| 128 + *signal* | `ryz launch`: that signal ended the rank that failed first, or asked the job to end (130 is Ctrl-C) |
";

/// The end of a help text that says what holds without the flag.
fn split_default(help: &str) -> (&str, Option<&str>) {
    let parts = help.trim().strip_suffix(']').and_then(|help| help.rsplit_once(" [default: "));
    parts.map_or((help, None), |(help, default)| (help, Some(default)))
}

fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn spelling(arg: &Arg) -> String {
    let names = [arg.get_short().map(|c| format!("-{c}")), arg.get_long().map(|name| format!("--{name}"))];
    let mut text = names.into_iter().flatten().collect::<Vec<_>>().join(", ");
    if arg.get_action().takes_values() {
        let values = arg.get_value_names().unwrap_or_default().iter().map(ToString::to_string);
        let values = values.collect::<Vec<_>>().join(" ");
        text = if arg.is_positional() { values } else { format!("{text} {values}") };
    }
    text
}

fn row(arg: &Arg) -> String {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let (help, said) = split_default(&help);
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = match (said, defaults.join(",")) {
        (Some(said), _) => cell(said),
        (None, given) if given.is_empty() || !arg.get_action().takes_values() => "–".into(),
        (None, given) => format!("`{given}`"),
    };
    let possible: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|it| !it.is_hide_set())
        .map(|it| format!("`{}`", it.get_name()))
        .collect();
    let choice = if possible.is_empty() || !arg.get_action().takes_values() {
        String::new()
    } else {
        format!(": {}", possible.join(", "))
    };
    format!("| `{}` | {default} | {}{choice} |\n", cell(&spelling(arg)), cell(help))
}

fn table<'a>(args: impl Iterator<Item = &'a Arg>) -> String {
    let rows: String = args.filter(|arg| !arg.is_hide_set()).map(row).collect();
    if rows.is_empty() { rows } else { format!("\n| flag | default | meaning |\n|---|---|---|\n{rows}") }
}

/// The section of a command and those of its subcommands.
fn section(command: &Command, name: &str, common: &BTreeSet<String>, page: &mut String) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let own = |arg: &&Arg| !common.contains(arg.get_id().as_str());
    if !command.has_subcommands() {
        let usage = command.clone().render_usage().to_string();
        let usage = usage.trim_start_matches("Usage:").split_whitespace().collect::<Vec<_>>().join(" ");
        let _ = write!(page, "\n## `{name}`\n\n{about}.\n\n```text\n{usage}\n```\n");
        *page += &table(command.get_arguments().filter(own));
        let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        if let Some(examples) = examples.strip_prefix("Examples:\n") {
            let lines: Vec<&str> = examples.lines().map(str::trim).collect();
            let _ = write!(page, "\n```sh\n{}\n```\n", lines.join("\n"));
        }
    }
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help")
    {
        section(inner, &format!("{name} {}", inner.get_name()), common, page);
    }
}

#[test]
fn the_page_on_the_command_line_is_what_the_commands_define() {
    let mut root = ryz::command::definition().term_width(0);
    root.build();
    let is_common = |arg: &&Arg| arg.is_global_set() || ["help", "version"].contains(&arg.get_id().as_str());
    let common: BTreeSet<String> =
        root.get_arguments().filter(is_common).map(|arg| arg.get_id().to_string()).collect();
    let mut page = format!("{HEAD}\n## Flags of every command\n");
    page += &table(root.get_arguments().filter(is_common));
    section(&root, "ryz", &common, &mut page);
    page += TAIL;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/cli.md");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &page).expect("the page can be written");
    }
    assert!(
        std::fs::read_to_string(&path).is_ok_and(|there| there == page),
        "{} is not what the commands define; run `UPDATE=1 cargo test -p ryz --test cli reference` and commit the result",
        path.display()
    );
}
