//! The output of `ryz generate`: streamed text, or JSON at the end.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use ryzanstein_orchestrator::plural;
use ryzanstein_orchestrator::table::{Screen, Tone};
use ryzanstein_process_group::units;

use crate::command::screen;
use crate::generate::{Progress, Prompt, Response, Timings};

/// Format of the text.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Json,
}

/// The output of a rank; only rank 0 has one.
pub(crate) struct LiveText {
    is_first: bool,
    format: Format,
    screen: Screen,
    bar: Option<ProgressBar>,
    /// Text that is shown before the first token.
    prompt: Option<String>,
    /// True while a piece of text without a line break at its end is on the screen.
    is_open: bool,
    /// True once the number of a token is on the screen.
    has_ids: bool,
}

impl LiveText {
    /// Shows the progress of loading from now on.
    pub(crate) fn start(is_first: bool, format: Format, screen: Screen, prompt: &Prompt) -> Self {
        let has_bar = is_first && format == Format::Text && std::io::stderr().is_terminal();
        let prompt = match prompt {
            Prompt::Text(text) => Some(text.clone()),
            Prompt::Tokens(_) | Prompt::Chat(_) => None,
        };
        let bar = has_bar.then(progress_bar);
        Self { is_first, format, screen, bar, prompt, is_open: false, has_ids: false }
    }

    pub(crate) fn tell(&mut self, progress: Progress<'_>) {
        match progress {
            Progress::Loading(read, all) => {
                if let Some(bar) = &self.bar {
                    bar.set_length(all as u64);
                    bar.set_position(read as u64);
                }
            }
            Progress::Loaded => {
                if let Some(bar) = self.bar.take() {
                    bar.finish_and_clear();
                }
                if let Some(prompt) = self.prompt.take() {
                    let painted = self.screen.paint(Tone::Faint, &prompt);
                    self.show(&painted);
                }
            }
            Progress::Token(_, Some(text)) | Progress::Rest(text) => self.show(text),
            // A model without a tokenizer.
            Progress::Token(token, None) => {
                let space = if self.has_ids { " " } else { "" };
                self.show(&format!("{space}{token}"));
                self.has_ids = true;
            }
        }
    }

    /// Prints the last line, or the JSON.
    pub(crate) fn end(mut self, response: &Response) {
        if !self.is_first {
            return;
        }
        match self.format {
            Format::Json => screen::print(&format!("{}\n", response.json())),
            Format::Text => {
                self.close_line();
                let summary = self.screen.paint(Tone::Faint, &summary(response));
                screen::print_aside(&format!("{summary}\n"));
                if let Some(digest) = &response.logits_digest {
                    screen::print_aside(&format!("SHA-256 of the logits: {digest}\n"));
                }
            }
        }
    }

    /// Completes the output before an error message.
    pub(crate) fn fail(mut self) {
        self.bar = None;
        self.close_line();
    }

    fn show(&mut self, new: &str) {
        if self.is_first && self.format == Format::Text && !new.is_empty() {
            screen::print(new);
            self.is_open = !new.ends_with('\n');
        }
    }

    fn close_line(&mut self) {
        if self.is_open {
            screen::print("\n");
            self.is_open = false;
        }
    }
}

fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("loading {bar:30} {percent:>3} %")
        .expect("the template is correct")
        .progress_chars("=> ");
    ProgressBar::new(1).with_style(style)
}

/// Returns a summary: `load 1.0 s · prefill 8 tokens 120 ms · 33 tokens, 4.9 tokens/s`.
fn summary(response: &Response) -> String {
    let time = |duration: Duration| units::time(duration.as_secs_f64() * 1e6);
    let Timings { load, prefill, .. } = response.timings;
    let mut parts = vec![format!("load {}", time(load))];
    if !response.tokens.is_empty() {
        parts.push(format!("prefill {} {}", plural(response.prompt_tokens, "token"), time(prefill)));
    }
    let rate = response.timings.tokens_per_second(response.tokens.len());
    let rate = rate.map_or_else(String::new, |rate| format!(", {rate:.1} tokens/s"));
    parts.push(format!("{}{rate}", plural(response.tokens.len(), "token")));
    parts.join(" · ")
}
