//! Sequences, token by token.

#![expect(unsafe_code, reason = "a recorded pass keeps addresses; the block says why they stay")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use ryzanstein_process_group::{ProcessGroup, Recorded};

use super::llama::Llama;
use crate::attention::KvCache;
use crate::compute::{Batch, RecordedGraph, SlotMapping};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Sequences that grow token by token, several in one pass.
///
/// On a GPU, the pass of one token for each of so many sequences is recorded into a graph when it has run once, and
/// repeated from then on whenever so many get a token, whichever they are: one launch in place of hundreds, with the same
/// result. Each number of sequences has a graph of its own, and memory for it. The group that is passed must be the same
/// from then on, and end after the decoder: NCCL does not let go of what a graph may call. A sequence that has ended makes room
/// for another by [`clear`](Self::clear), and the graphs stay.
#[derive(Debug)]
pub struct Decoder<'a> {
    // First, so that they go before the memory whose addresses they hold.
    passes: BTreeMap<usize, Pass>,
    cache: KvCache,
    model: &'a Llama,
    graph: bool,
}

/// The pass of one token for each of some sequences.
#[derive(Debug)]
struct Pass {
    // First, as above.
    recorded: Option<(RecordedGraph, Recorded)>,
    batch: Batch,
    logits: Option<Tensor>,
}

impl Llama {
    /// Up to `sequences` sequences of at most `capacity` positions each. With `graph`, passes of one token are recorded and
    /// repeated where that is cheaper.
    ///
    /// # Errors
    /// As [`cache`](Self::cache).
    pub fn decoder(&self, sequences: usize, capacity: usize, graph: bool) -> Result<Decoder<'_>> {
        let cache = self.caches(sequences, capacity)?;
        Ok(Decoder { passes: BTreeMap::new(), cache, model: self, graph })
    }
}

impl Decoder<'_> {
    /// Adds any number of tokens to a sequence, and gives the logits `[1, vocabulary]` in `f32` after the last.
    ///
    /// # Errors
    /// When there is no such sequence, and as [`Llama::forward`].
    pub fn prefill(&mut self, sequence: usize, tokens: &[u32], group: &mut ProcessGroup) -> Result<Tensor> {
        self.model.prefill(tokens, sequence, &mut self.cache, group)
    }

    /// Adds a token to each of some sequences, given as pairs of sequence and token, and gives the logits
    /// `[pairs, vocabulary]` in `f32` after them, in the order of the pairs. Every rank passes the same.
    ///
    /// # Errors
    /// When there are no pairs, a sequence is not there or named twice, and as [`Llama::forward`].
    pub fn decode(&mut self, tokens: &[(usize, u32)], group: &mut ProcessGroup) -> Result<&Tensor> {
        let (slots, tokens) = self.admit(tokens)?;
        let Self { passes, cache, model, graph } = self;
        let (compute, rotary) = (&*model.compute, &model.rotary);
        let pass = match passes.entry(tokens.len()) {
            Entry::Occupied(there) => {
                let pass = there.into_mut();
                compute.update_batch(&mut pass.batch, &tokens, &slots, rotary)?;
                pass
            }
            Entry::Vacant(free) => {
                let batch = compute.batch(&tokens, &slots, rotary)?;
                free.insert(Pass { recorded: None, batch, logits: None })
            }
        };
        let ran_before = pass.logits.is_some();
        if *graph && ran_before && pass.recorded.is_none() {
            // What the last pass used is free again, so that the recording finds all the memory it needs.
            pass.logits = None;
            let (batch, logits) = (&pass.batch, &mut pass.logits);
            let mut recording = None;
            let collectives = group.record(|group| {
                let work = &mut || {
                    *logits = Some(model.logits(batch, cache, group)?);
                    Ok(())
                };
                // SAFETY: the model is borrowed, and batch, cache and logits are held, for as long as the recording, and the
                // batch's slots are checked before each pass; what is replayed goes through the group that recorded it, or
                // not at all, and not once that has failed.
                recording = unsafe { compute.record(work) }?;
                Ok::<_, Error>(())
            });
            pass.recorded = match collectives {
                Ok(collectives) => recording.map(|recording| (recording, collectives)),
                Err(error) => {
                    tracing::warn!(%error, sequences = tokens.len(), "a pass cannot be recorded; none is from now on");
                    None
                }
            };
            *graph = pass.recorded.is_some();
        }
        match &pass.recorded {
            Some((recording, collectives)) => group.replay(collectives, || recording.replay())?,
            None => pass.logits = Some(model.logits(&pass.batch, cache, group)?),
        }
        cache.advance(&slots, tokens.len());
        group.synchronize()?;
        pass.logits.as_ref().ok_or_else(|| Error::input("the recorded pass gave no logits"))
    }

    /// What can be refused before anything is computed; else where the tokens go.
    fn admit(&self, tokens: &[(usize, u32)]) -> Result<(SlotMapping, Vec<u32>)> {
        if tokens.is_empty() {
            return Err(Error::input("at least one sequence must get a token"));
        }
        let place = |(sequence, _): &(usize, u32)| Ok((*sequence, self.cache.end(*sequence, 1)?));
        let slots = tokens.iter().map(place).collect::<Result<_>>()?;
        let tokens: Vec<u32> = tokens.iter().map(|(_, token)| *token).collect();
        self.model.check(&tokens)?;
        Ok((SlotMapping::OnePerSequence(slots), tokens))
    }

    /// Forgets a sequence, so that another can take its number.
    pub fn clear(&mut self, sequence: usize) {
        self.cache.truncate(sequence, 0);
    }

    /// Positions held of a sequence; none of one that is not there.
    pub fn len(&self, sequence: usize) -> usize {
        self.cache.len(sequence)
    }

    /// Whether it holds no positions at all.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }
}
