//! One line on a terminal that says which row is being measured.

use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressStyle};
use ryzanstein_process_group::units;

/// The line; nothing where standard error is no terminal.
pub(super) struct Progress(Option<ProgressBar>);

impl Progress {
    /// Creates the line. `what` is its beginning: the variant and its round, or nothing.
    pub(super) fn new(is_wanted: bool, what: &str) -> Self {
        let is_shown = is_wanted && std::io::stderr().is_terminal();
        let style =
            ProgressStyle::with_template("{prefix}{pos} of {len} {msg}").expect("the template is correct");
        let bar = || ProgressBar::new(1).with_style(style).with_prefix(what.to_owned());
        Self(is_shown.then(bar))
    }

    /// Reports that row `number` of `of` is being measured.
    pub(super) fn tell(&self, number: usize, of: usize, op: &str, bytes: usize) {
        let Some(bar) = &self.0 else { return };
        bar.set_length(of as u64);
        bar.set_message(format!("{op} {}", units::bytes(bytes as f64)));
        bar.set_position(number as u64);
        bar.tick();
    }

    /// Runs `write` while the line is removed from the terminal.
    pub(super) fn aside<R>(&self, write: impl FnOnce() -> R) -> R {
        match &self.0 {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Removes the line.
    pub(super) fn end(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
