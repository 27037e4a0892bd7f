//! The width and colours of the output, and the level of the logs.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::sync::OnceLock;

use rustix::io::Errno;
use ryzanstein_config::{Config, Source};
use ryzanstein_orchestrator::console;
use ryzanstein_orchestrator::table::Screen;
use serde::Serialize;

/// Flags of every command.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Colours: auto (on a terminal, unless NO_COLOR is set), always or never
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    color: Color,
    /// Log more: -v what happens, -vv details for debugging
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Width of the lines [default: that of the terminal; unlimited elsewhere]
    #[arg(long, global = true, hide = true, value_name = "N")]
    columns: Option<usize>,
}

/// Format of a command's result: for people or for programs.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Table,
    Json,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Color {
    Auto,
    Always,
    Never,
}

/// The first error of [`print`].
static WRITE_ERROR: OnceLock<io::Error> = OnceLock::new();

/// Writes to standard output. An error is kept for [`write_error`]; a reader that stops early, such as `head`, is none.
pub(crate) fn print(text: &str) {
    let out = io::stdout().lock();
    if let Err(error) = console::write_all(&out, text.as_bytes(), |_| {})
        && error != Errno::PIPE
    {
        let _ = WRITE_ERROR.set(error.into());
    }
}

/// Writes to standard error. An error has no other place to go, so it is ignored.
pub(crate) fn print_aside(text: &str) {
    let _ = console::write_all(&io::stderr().lock(), text.as_bytes(), |_| {});
}

/// Formats a value as one line of JSON.
///
/// # Panics
/// Never panics for results, which are numbers and texts.
pub fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("numbers and texts")
}

/// Returns the first error of a write to standard output.
pub(crate) fn write_error() -> Option<&'static io::Error> {
    WRITE_ERROR.get()
}

/// Returns true if standard output is a terminal.
pub(crate) fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

impl Args {
    pub(crate) fn stdout(&self) -> Screen {
        self.screen(&std::io::stdout())
    }

    pub(crate) fn stderr(&self) -> Screen {
        self.screen(&std::io::stderr())
    }

    /// Prints a result: its table, or its value as one line of JSON.
    pub(crate) fn show(&self, format: Format, value: &impl Serialize, table: impl FnOnce(Screen) -> String) {
        print(&match format {
            Format::Table => table(self.stdout()),
            Format::Json => json(value) + "\n",
        });
    }

    fn screen(&self, stream: &(impl IsTerminal + AsFd)) -> Screen {
        let is_terminal = stream.is_terminal();
        let measured = || terminal_size::terminal_size_of(stream).map(|(width, _)| width.0.into());
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let color = match self.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => {
                is_terminal
                    && !is_set("NO_COLOR")
                    && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
            }
        };
        let width = self.columns.or_else(|| if is_terminal { measured() } else { None });
        Screen { width: width.filter(|width| *width > 0), color }
    }

    /// Returns the flags that give a rank this screen; `prefix` is the width of the prefix of its lines.
    pub(crate) fn handed_down(&self, prefix: usize) -> Vec<String> {
        let screen = self.stdout();
        let color = if screen.color { "always" } else { "never" };
        let mut flags = vec!["--color".into(), color.into()];
        if let Some(width) = screen.width {
            flags.extend(["--columns".into(), width.saturating_sub(prefix).max(1).to_string()]);
        }
        flags
    }

    /// Sets the log level: the level of `-v`, or warnings only on a terminal, unless the user has set `log.level`.
    pub(crate) fn set_log_level(&self, config: &mut Config) {
        let level = match self.verbose {
            0 => "warn",
            1 => "info",
            2 => "debug",
            _ => "trace",
        };
        let is_unset = config.source_of("log.level") == Some(Source::Default);
        if self.verbose > 0 || (is_unset && std::io::stderr().is_terminal()) {
            config.log.level = level.into();
        }
    }
}
