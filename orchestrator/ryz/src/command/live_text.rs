//! The output of `ryz generate`: streamed text, or JSON at the end. Ctrl-C shows what has been generated.

use crate::command::screen;
use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::generate::{Progress, Prompt, Response, Timings};
use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use ryzanstein_orchestrator::table::{Screen, Tone};
use ryzanstein_process_group::units;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

/// How the text is written.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Json,
}

/// The exit code 128 plus the number of SIGINT, as in shells.
const INTERRUPTED: i32 = 130;

/// The output of a rank; only rank 0 has one.
pub(crate) struct LiveText {
    state: Arc<Mutex<State>>,
}

struct State {
    is_first: bool,
    format: Format,
    screen: Screen,
    bar: Option<ProgressBar>,
    /// Text that is shown before the first token.
    prompt: Option<String>,
    tokens: Vec<u32>,
    /// The generated text; `None` without a tokenizer.
    text: Option<String>,
    /// True while a piece of text without a line break at its end is on the screen.
    is_open: bool,
    timings: Timings,
    loaded: Option<Instant>,
    first: Option<Instant>,
}

impl LiveText {
    /// Shows the progress of loading, and handles Ctrl-C from now on.
    pub(crate) fn start(
        is_first: bool,
        format: Format,
        screen: Screen,
        prompt: &Prompt,
    ) -> anyhow::Result<Self> {
        let has_bar = is_first && format == Format::Text && std::io::stderr().is_terminal();
        let prompt = match prompt {
            Prompt::Text(text) => Some(text.clone()),
            Prompt::Tokens(_) | Prompt::Chat(_) => None,
        };
        let state = State {
            is_first,
            format,
            screen,
            bar: has_bar.then(progress_bar),
            prompt,
            tokens: Vec::new(),
            text: None,
            is_open: false,
            timings: Timings::default(),
            loaded: None,
            first: None,
        };
        let state = Arc::new(Mutex::new(state));
        let on_interrupt = Arc::clone(&state);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .context("cannot watch for Ctrl-C")?;
        let mut interrupt = {
            let _inside = runtime.enter();
            signal(SignalKind::interrupt()).context("cannot watch for Ctrl-C")?
        };
        std::thread::Builder::new()
            .name("ryz-interrupt".into())
            .spawn(move || {
                if runtime.block_on(interrupt.recv()).is_some() {
                    lock(&on_interrupt).interrupted();
                    std::process::exit(INTERRUPTED);
                }
            })
            .context("cannot watch for Ctrl-C")?;
        Ok(Self { state })
    }

    pub(crate) fn tell(&mut self, progress: Progress<'_>) {
        lock(&self.state).tell(progress);
    }

    /// Prints the last line, or the JSON.
    pub(crate) fn end(self, response: &Response) {
        let mut state = lock(&self.state);
        if !state.is_first {
            return;
        }
        match state.format {
            Format::Json => screen::print(&format!("{}\n", response.json())),
            Format::Text => {
                state.close_line();
                state.timings = response.timings;
                state.summarize(response.prompt_tokens);
                if let Some(digest) = &response.logits_digest {
                    eprintln!("SHA-256 of the logits: {digest}");
                }
            }
        }
    }

    /// Completes the output before an error message.
    pub(crate) fn fail(self) {
        let mut state = lock(&self.state);
        state.bar = None;
        state.close_line();
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("loading {bar:30} {percent:>3} %")
        .expect("the template is correct")
        .progress_chars("=> ");
    ProgressBar::new(1).with_style(style)
}

impl State {
    fn tell(&mut self, progress: Progress<'_>) {
        match progress {
            Progress::Loading(read, all) => {
                if let Some(bar) = &self.bar {
                    bar.set_length(all as u64);
                    bar.set_position(read as u64);
                }
            }
            Progress::Loaded(load) => {
                if let Some(bar) = self.bar.take() {
                    bar.finish_and_clear();
                }
                self.timings.load = load;
                self.loaded = Some(Instant::now());
                if let Some(prompt) = self.prompt.as_ref().filter(|_| self.is_shown()) {
                    screen::print(&self.screen.paint(Tone::Faint, prompt));
                    self.is_open = true;
                }
            }
            Progress::Token(token, text) => {
                self.first.get_or_insert_with(Instant::now);
                self.tokens.push(token);
                match text {
                    Some(text) => self.show(text),
                    None => self.show_id(token),
                }
            }
            Progress::Rest(text) => self.show(text),
        }
    }

    fn is_shown(&self) -> bool {
        self.is_first && self.format == Format::Text
    }

    fn show(&mut self, new: &str) {
        self.text.get_or_insert_default().push_str(new);
        if self.is_shown() && !new.is_empty() {
            screen::print(new);
            self.is_open = !new.ends_with('\n');
        }
    }

    /// Shows a token as its number, for a model without a tokenizer.
    fn show_id(&mut self, token: u32) {
        if self.is_shown() {
            screen::print(&if self.tokens.len() == 1 { token.to_string() } else { format!(" {token}") });
            self.is_open = true;
        }
    }

    fn close_line(&mut self) {
        if self.is_open {
            screen::print("\n");
            self.is_open = false;
        }
    }

    fn interrupted(&mut self) {
        if !self.is_first {
            // Rank 0 exits for all. Exiting before it would look like a failure.
            std::thread::sleep(Duration::from_millis(200));
            return;
        }
        self.bar = None;
        self.close_line();
        if let Some((loaded, first)) = self.loaded.zip(self.first) {
            self.timings.prefill = first - loaded;
            self.timings.decode = first.elapsed();
        }
        match self.format {
            Format::Text => self.summarize(0),
            Format::Json => {
                let mut line = json!({ "token_ids": self.tokens });
                if let Some(text) = &self.text {
                    line["text"] = json!(text);
                }
                line["stop"] = json!("interrupted");
                screen::print(&format!("{line}\n"));
            }
        }
    }

    /// Prints a summary: `load 1.0 s · prefill 8 tokens 120 ms · 33 tokens, 4.9 tokens/s`.
    fn summarize(&self, prompt_tokens: usize) {
        let time = |duration: Duration| units::time(duration.as_secs_f64() * 1e6);
        let Timings { load, prefill, .. } = self.timings;
        let mut parts = vec![format!("load {}", time(load))];
        if !self.tokens.is_empty() {
            let tokens =
                if prompt_tokens > 0 { format!("{} ", plural(prompt_tokens)) } else { String::new() };
            parts.push(format!("prefill {tokens}{}", time(prefill)));
        }
        let rate = self.timings.tokens_per_second(self.tokens.len());
        let rate = rate.map_or_else(String::new, |rate| format!(", {rate:.1} tokens/s"));
        parts.push(format!("{}{rate}", plural(self.tokens.len())));
        eprintln!("{}", self.screen.paint(Tone::Faint, &parts.join(" · ")));
    }
}

fn plural(tokens: usize) -> String {
    format!("{tokens} token{}", if tokens == 1 { "" } else { "s" })
}
