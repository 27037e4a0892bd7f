//! Text generation: one pass for the whole prompt, then one for each token.

mod chat;
pub(crate) mod chat_error;
mod growth;
mod panics;
mod patterns;
mod sample;
mod text;
mod text_model;
mod tokenizer;

use std::ops::ControlFlow;

use ryzanstein_process_group::Rank;

pub use self::chat::{ChatTemplate, ChatTime, Message};
pub use self::chat_error::ChatError;
pub use self::panics::catches_panics;
pub use self::sample::{Penalties, Sampler, Sampling};
pub use self::text::TextStream;
pub use self::text_model::TextModel;
pub use self::tokenizer::Tokenizer;
use crate::attention::CacheSize;
use crate::digest::digest;
use crate::error::{RequestError, Result};
use crate::model::{Decoder, GreedyPass, Llama, ModelGroups, NextTokens, Passes, all_gather, synchronize};

/// The options of a generation.
#[derive(Clone, PartialEq, Debug)]
pub struct GenerateOptions {
    /// The maximum number of new tokens.
    pub max_new_tokens: usize,
    /// The sampling method.
    pub sampling: Sampling,
    /// Penalties for tokens that have occurred.
    pub penalties: Penalties,
    /// True to continue after an end token, and after a stop string of the model.
    pub ignore_end: bool,
    /// The execution of passes on a GPU: replays of a CUDA graph, or launches of every operation.
    pub passes: Passes,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_new_tokens: 128,
            sampling: Sampling::Greedy,
            penalties: Penalties::default(),
            ignore_end: false,
            passes: Passes::Graph,
        }
    }
}

/// The reason for the end of a generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopReason {
    /// The maximum number of tokens was reached.
    Length,
    /// The model generated this end token, which is the last of the new ones.
    End(u32),
    /// The caller stopped it.
    Caller,
}

/// The result of a generation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Generated {
    /// The new tokens, without the prompt.
    pub tokens: Vec<u32>,
    /// The reason for the end of the generation.
    pub stop: StopReason,
}

impl Llama {
    /// Generates tokens after `prompt`. Every rank passes the same arguments and returns the same tokens: all choose from identical logits
    /// or candidates, with the same random numbers.
    ///
    /// # Errors
    /// Returns an error if ranks pass different prompts or options, prompt and new tokens are longer than the model allows, a
    /// token is not in the vocabulary, or the group fails.
    pub fn generate(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        groups: &mut dyn ModelGroups,
    ) -> Result<Generated> {
        self.generate_with(prompt, options, groups, |_| ControlFlow::Continue(()))
    }

    /// Generates as [`generate`](Self::generate) does, and calls `on_token` with each new token. Return [`ControlFlow::Break`] to
    /// stop. Every rank must do so after the same token.
    ///
    /// # Errors
    /// Returns the errors of [`generate`](Self::generate).
    pub fn generate_with(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        groups: &mut dyn ModelGroups,
        on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let _span = tracing::info_span!("generate", prompt_tokens = prompt.len()).entered();
        check_same_request(prompt, options, groups)?;
        let mut sampler = Sampler::new(options.sampling)?.with_penalties(options.penalties, prompt)?;
        if options.max_new_tokens == 0 {
            return Ok(Generated { tokens: Vec::new(), stop: StopReason::Length });
        }
        // The last token is chosen but not fed back.
        let positions = prompt.len().saturating_add(options.max_new_tokens - 1);
        let mut decoder = Decoder::new(self, CacheSize::full(1, positions), options.passes)?;
        // The pass that a GPU has begun before the host knew its token.
        let mut ahead = None;
        let outcome =
            self.follow(prompt, options, (&mut sampler, &mut decoder, &mut ahead), groups, on_token);
        // It uses the memory of the decoder.
        let waited = if ahead.is_some() { synchronize(groups) } else { Ok(()) };
        let generated = outcome?;
        waited.map(|()| generated)
    }

    /// Generates after `prompt` with an empty decoder.
    fn follow(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        (sampler, decoder, ahead): (&mut Sampler, &mut Decoder<&Self>, &mut Option<GreedyPass>),
        groups: &mut dyn ModelGroups,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let mut generated = Generated { tokens: Vec::new(), stop: StopReason::Length };
        // Tokens that the model has not seen.
        let mut next = prompt.to_vec();
        loop {
            let is_last = generated.tokens.len() + 1 == options.max_new_tokens;
            let token = if sampler.is_greedy() {
                let pass = match ahead.take() {
                    Some(pass) => pass,
                    None => decoder.start_greedy(&[(0, NextTokens::Known(&next))], groups)?,
                };
                if decoder.is_asynchronous() && !is_last {
                    *ahead = Some(decoder.start_greedy(&[(0, NextTokens::Chosen)], groups)?);
                }
                pass.wait(groups)?.remove(0)?
            } else {
                sampler.choose(&decoder.prefill(0, &next, groups)?.values()?)?
            };
            generated.tokens.push(token);
            let wish = on_token(token);
            let is_end = !options.ignore_end && self.config.eos_tokens.contains(&token);
            if is_end || wish.is_break() || is_last {
                if is_end {
                    generated.stop = StopReason::End(token);
                } else if wish.is_break() {
                    generated.stop = StopReason::Caller;
                }
                return Ok(generated);
            }
            next.clear();
            next.push(token);
        }
    }
}

/// Returns an error if a request is not the same on all ranks: they would compute with a mixture of its prompts. All ranks return
/// the same error.
fn check_same_request(prompt: &[u32], options: &GenerateOptions, groups: &mut dyn ModelGroups) -> Result<()> {
    let mine = (digest(prompt.iter().flat_map(|token| token.to_le_bytes())), format!("{options:?}"));
    let all = all_gather(&mine, groups)?;
    let others = |is_other: &dyn Fn(&(u64, String)) -> bool| -> Vec<Rank> {
        all.iter().filter(|(_, asked)| is_other(asked)).map(|(rank, _)| *rank).collect()
    };
    let (first, (prompt, options)) = &all[0];
    for (what, ranks) in
        [("a prompt", others(&|asked| asked.0 != *prompt)), ("options", others(&|asked| asked.1 != *options))]
    {
        if !ranks.is_empty() {
            return Err(RequestError::Different { what, first: *first, ranks }.into());
        }
    }
    Ok(())
}
