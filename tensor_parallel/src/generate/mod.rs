//! Text generation: the whole prompt in one pass, then token by token.

mod chat;
pub(crate) mod chat_error;
mod python_json;
mod sample;
mod text;
mod text_model;
mod tokenizer;

use std::ops::ControlFlow;

use ryzanstein_process_group::Rank;

pub use self::chat::{ChatTemplate, ChatTime, Message};
pub use self::chat_error::ChatError;
pub use self::sample::{Penalties, Sampler, Sampling};
pub use self::text::TextStream;
pub use self::text_model::TextModel;
pub use self::tokenizer::{Tokenizer, catches_panics};
use crate::digest::digest;
use crate::error::{RequestError, Result};
use crate::model::{Decoder, Llama, ModelGroups, Passes, all_gather};

/// What to generate.
#[derive(Clone, PartialEq, Debug)]
pub struct GenerateOptions {
    /// The most tokens to add.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Penalties for tokens that have occurred.
    pub penalties: Penalties,
    /// Whether to continue after a token that ends a text.
    pub ignore_end: bool,
    /// Whether a GPU replays a CUDA graph for each token, or launches every operation.
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

/// Why generation stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopReason {
    /// It generated the maximum number of tokens.
    Length,
    /// The model generated this end token, which is the last of the new ones.
    End(u32),
    /// The caller stopped it.
    Caller,
}

/// What was generated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Generated {
    /// The new tokens, without the prompt.
    pub tokens: Vec<u32>,
    /// Why generation stopped.
    pub stop: StopReason,
}

impl Llama {
    /// Generates tokens after `prompt`. Every rank passes the same arguments and gets the same tokens: the logits are gathered,
    /// so all ranks choose from the same bits with the same random numbers.
    ///
    /// # Errors
    /// When ranks pass different prompts or options, prompt and new tokens are longer than the model allows, a token is not in
    /// the vocabulary, or the group fails.
    pub fn generate(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        groups: &mut dyn ModelGroups,
    ) -> Result<Generated> {
        self.generate_with(prompt, options, groups, |_| ControlFlow::Continue(()))
    }

    /// As [`generate`](Self::generate), and calls `on_token` with each new token as it is chosen. Return
    /// [`ControlFlow::Break`] to stop. Every rank must do so after the same token.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn generate_with(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        groups: &mut dyn ModelGroups,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let _span = tracing::info_span!("generate", prompt_tokens = prompt.len()).entered();
        check_same_request(prompt, options, groups)?;
        let mut sampler = Sampler::new(options.sampling)?.with_penalties(options.penalties, prompt)?;
        let mut generated = Generated { tokens: Vec::new(), stop: StopReason::Length };
        if options.max_new_tokens == 0 {
            return Ok(generated);
        }
        // The last token is chosen and never fed back.
        let positions = prompt.len().checked_add(options.max_new_tokens - 1);
        let positions =
            positions.ok_or(RequestError::Overflow { prompt: prompt.len(), more: options.max_new_tokens })?;
        let mut decoder = Decoder::new(self, 1, positions, options.passes)?;
        let mut token = sampler.choose(&decoder.prefill(0, prompt, groups)?.values()?)?;
        loop {
            generated.tokens.push(token);
            let wish = on_token(token);
            if !options.ignore_end && self.config.eos_tokens.contains(&token) {
                generated.stop = StopReason::End(token);
                return Ok(generated);
            }
            if wish.is_break() {
                generated.stop = StopReason::Caller;
                return Ok(generated);
            }
            if generated.tokens.len() == options.max_new_tokens {
                return Ok(generated);
            }
            token = sampler.choose(&decoder.decode(&[(0, token)], groups)?.values()?)?;
        }
    }
}

/// Refuses a request that is not the same on all ranks: they would compute with a mixture of its prompts. All ranks get the
/// same error.
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
