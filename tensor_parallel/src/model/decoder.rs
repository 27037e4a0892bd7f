//! One sequence, token by token.

use ryzanstein_process_group::ProcessGroup;

use super::llama::Llama;
use crate::attention::KvCache;
use crate::compute::{Recording, Step};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// A sequence that grows token by token.
///
/// On a GPU the pass of one token is recorded into a graph when it has run once, and repeated from then on: one launch
/// in place of hundreds, with the same result. The group that is passed must be the same each time, and live for as
/// long as this.
#[derive(Debug)]
pub struct Decoder<'a> {
    // First, so that it goes before the memory whose addresses it holds.
    recording: Option<Box<dyn Recording>>,
    step: Option<Step>,
    logits: Option<Tensor>,
    cache: KvCache,
    model: &'a Llama,
    graph: bool,
}

impl Llama {
    /// A sequence of at most `capacity` positions. With `graph`, passes of one token are recorded and repeated where
    /// that is cheaper.
    ///
    /// # Errors
    /// As [`cache`](Self::cache).
    pub fn decoder(&self, capacity: usize, graph: bool) -> Result<Decoder<'_>> {
        let cache = self.cache(capacity)?;
        Ok(Decoder { recording: None, step: None, logits: None, cache, model: self, graph })
    }
}

impl Decoder<'_> {
    /// Adds any number of tokens, and gives the logits `[1, vocabulary]` in `f32` after the last.
    ///
    /// # Errors
    /// As [`Llama::forward`].
    pub fn prompt(&mut self, tokens: &[u32], group: &mut ProcessGroup) -> Result<Tensor> {
        self.model.forward_last(tokens, &mut self.cache, group)
    }

    /// Adds one token, and gives the logits `[1, vocabulary]` in `f32` after it.
    ///
    /// # Errors
    /// As [`Llama::forward`].
    pub fn next(&mut self, token: u32, group: &mut ProcessGroup) -> Result<&Tensor> {
        self.model.admit(&[token], &self.cache)?;
        let compute = &*self.model.compute;
        let position = self.cache.len();
        let mut ran_before = true;
        let step = match &mut self.step {
            Some(step) => {
                compute.set_step(step, &[token], position, &self.model.rotary)?;
                &*step
            }
            none => {
                ran_before = false;
                none.insert(compute.step(&[token], position, &self.model.rotary)?)
            }
        };
        if self.graph && ran_before && self.recording.is_none() {
            // What the last pass used is free again, so that the recording finds all the memory it needs.
            self.logits = None;
            let (model, cache, logits) = (self.model, &mut self.cache, &mut self.logits);
            self.recording = compute.record(&mut || {
                *logits = Some(model.last_logits(step, cache, group)?);
                Ok(())
            })?;
            self.graph = self.recording.is_some();
        }
        match &self.recording {
            Some(recording) => recording.replay()?,
            None => self.logits = Some(self.model.last_logits(step, &mut self.cache, group)?),
        }
        self.cache.advance(1);
        group.synchronize()?;
        self.logits.as_ref().ok_or_else(|| Error::input("the recorded pass gave no logits"))
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// Whether it holds no positions.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }
}
