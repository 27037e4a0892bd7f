//! Loads a model and shows its text as it comes: `cargo run -p ryzanstein-examples --example stream_text -- DIR "Once upon a"`.

use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context as _, Result};
use ryzanstein_process_group::ProcessGroup;
use ryzanstein_tensor_parallel::{GenerateOptions, Llama, TextStream, Tokenizer};

const RANKS: usize = 2;

/// Every rank generates the same tokens; the first shows them.
fn rank_main(folder: &Path, prompt: &str, group: &mut ProcessGroup) -> Result<()> {
    let model = Llama::load(folder, None, group)?;
    let tokenizer = Tokenizer::open(folder)?.context("the folder has no tokenizer.json")?;
    let tokens = tokenizer.encode(prompt)?;
    let mut text = TextStream::new(&tokenizer, &tokens, &model.config().stop_strings);
    let is_first = group.rank().index() == 0;
    let show = |piece: &str| {
        if is_first {
            print!("{piece}");
            let _ = std::io::stdout().flush();
        }
    };
    show(prompt);
    let mut failed = None;
    let options = GenerateOptions { max_new_tokens: 32, ..GenerateOptions::default() };
    model.generate_with(&tokens, &options, group, |token| match text.push(token) {
        Ok(piece) => {
            show(&piece);
            if text.is_ended() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
        Err(error) => {
            failed = Some(error);
            ControlFlow::Break(())
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    // The last token may be half a character, which `push` held back.
    show(&(text.finish()? + "\n"));
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, prompt] = &arguments[..] else { anyhow::bail!("pass the folder of a model and a prompt") };
    std::thread::scope(|scope| {
        let ranks = ProcessGroup::loopback(RANKS).into_iter();
        let ranks: Vec<_> = ranks
            .map(|mut group| scope.spawn(move || rank_main(folder.as_ref(), prompt, &mut group)))
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })
}
