//! One sequence, token by token.

#![expect(unsafe_code, reason = "a recorded pass keeps addresses; the block says why they stay")]

use ryzanstein_process_group::{ProcessGroup, Recorded};

use super::llama::Llama;
use crate::attention::KvCache;
use crate::compute::{Recording, Step};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// A sequence that grows token by token.
///
/// On a GPU the pass of one token is recorded into a graph when it has run once, and repeated from then on: one launch
/// in place of hundreds, with the same result. The group that is passed must be the same from then on.
#[derive(Debug)]
pub struct Decoder<'a> {
    // First, so that it goes before the memory whose addresses it holds.
    recording: Option<Pass>,
    step: Option<Step>,
    logits: Option<Tensor>,
    cache: KvCache,
    model: &'a Llama,
    graph: bool,
}

/// A recorded pass of one token.
#[derive(Debug)]
struct Pass {
    recording: Box<dyn Recording>,
    collectives: Recorded,
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
            let mut recording = None;
            let collectives = group.record(|group| {
                let pass = &mut || {
                    *logits = Some(model.last_logits(step, cache, group)?);
                    Ok(())
                };
                // SAFETY: the model is borrowed, and step, cache and logits are held, for as long as the recording; what
                // is replayed goes through the group that recorded it, or not at all, and not once that has failed.
                recording = unsafe { compute.record(pass) }?;
                Ok::<_, Error>(())
            })?;
            self.recording = recording.map(|recording| Pass { recording, collectives });
            self.graph = self.recording.is_some();
        }
        match &self.recording {
            Some(Pass { recording, collectives }) => group.replay(collectives, || recording.replay())?,
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
