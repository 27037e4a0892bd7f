//! Decoding of several sequences.

#![expect(unsafe_code, reason = "a recorded pass keeps addresses; the block says why they stay")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::{Deref, Range};
use std::slice;
use std::sync::Arc;

use ryzanstein_process_group::CapturedCalls;

use super::groups::{ModelGroups, synchronize};
use super::llama::{Llama, MicroBatch};
use super::stage::cut;
use crate::attention::{CacheSize, KvCache};
use crate::compute::{CapturedGraph, SlotMapping};
use crate::error::{Error, RequestError, Result};
use crate::tensor::Tensor;

/// Sequences that grow token by token, several in one pass.
///
/// On a GPU, a pass of one token for each of n sequences runs normally the first time, is captured in a CUDA graph the second
/// time, and is replayed from then on, for any n sequences: one launch in place of hundreds, with the same result. Each n has its
/// own graph and memory. Pass the same groups to every call, and keep them alive longer than the decoder: NCCL keeps the
/// communicators that a graph may call. When a sequence has ended, [`clear`](Self::clear) makes room for another. Graphs stay valid
/// whatever happens to sequences and pages. Passes through several pipeline stages are not captured, because the stages process
/// different parts of them.
///
/// With P pipeline stages, the sequences of a pass are divided into P micro-batches, or one for each sequence if there are fewer,
/// so that the stages compute at the same time.
///
/// Every rank makes the same calls, also of [`fork`](Self::fork), [`truncate`](Self::truncate) and [`clear`](Self::clear).
///
/// It owns its shard of the model `M`, so an engine can keep it in a struct and move it to a thread.
#[derive(Debug)]
pub struct Decoder<M = Arc<Llama>> {
    // First, so that the graphs are dropped before the memory whose addresses they contain: their own, the cache's, the model's.
    passes: BTreeMap<usize, Pass>,
    cache: KvCache,
    model: M,
    kind: Passes,
    /// Logits of the last pass that gave a sequence several tokens.
    logits: Option<Tensor>,
}

/// The execution of a [`Decoder`]'s passes of one token per sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Passes {
    /// Launch every operation of every pass.
    Eager,
    /// Capture and replay passes where that is cheaper: on GPUs, from the second pass of the same number of sequences on.
    Graph,
}

/// The pass of one token for each of a number of sequences.
#[derive(Debug)]
struct Pass {
    // First, as above.
    recorded: Option<(CapturedGraph, CapturedCalls)>,
    part: MicroBatch,
    logits: Option<Tensor>,
}

impl Llama {
    /// Creates a decoder with a KV cache of this size.
    ///
    /// # Errors
    /// Returns the errors of [`cache`](Self::cache).
    pub fn decoder(self: &Arc<Self>, size: CacheSize, passes: Passes) -> Result<Decoder> {
        Decoder::new(Arc::clone(self), size, passes)
    }
}

impl<M: Deref<Target = Llama>> Decoder<M> {
    /// Creates a decoder. `M` must always dereference to the same model, as an `Arc` or a reference does.
    pub(crate) fn new(model: M, size: CacheSize, passes: Passes) -> Result<Self> {
        let cache = model.caches(size)?;
        Ok(Self { passes: BTreeMap::new(), cache, model, kind: passes, logits: None })
    }

    /// Does a [`step`](Self::step) for one sequence, such as a new prompt.
    ///
    /// # Errors
    /// Returns the errors of [`step`](Self::step).
    pub fn prefill(
        &mut self,
        sequence: usize,
        tokens: &[u32],
        groups: &mut dyn ModelGroups,
    ) -> Result<&Tensor> {
        self.step(&[(sequence, tokens)], groups)
    }

    /// Appends one token to each of several sequences, given as pairs of sequence and token. Returns the logits
    /// `[pairs, vocabulary]` in `f32` after them, in the order of the pairs. Every rank passes the same pairs.
    ///
    /// # Errors
    /// Returns an error if there are no pairs, or if a sequence does not exist or occurs twice; otherwise the errors of
    /// [`Llama::forward`].
    pub fn decode(&mut self, tokens: &[(usize, u32)], groups: &mut dyn ModelGroups) -> Result<&Tensor> {
        let pairs: Vec<_> =
            tokens.iter().map(|(sequence, token)| (*sequence, slice::from_ref(token))).collect();
        self.step(&pairs, groups)
    }

    /// Runs a pass of one token for each sequence. With [`Passes::Graph`], the second one of a size is captured.
    fn single_tokens(&mut self, pairs: &[(usize, &[u32])], groups: &mut dyn ModelGroups) -> Result<&Tensor> {
        let more = self.validate(pairs)?;
        let Self { passes, cache, model, kind, .. } = self;
        cache.append(&more, |cache| Self::single_pass(pairs, (passes, kind), (model, cache), groups))?;
        let pass = passes.get(&pairs.len()).and_then(|pass| pass.logits.as_ref());
        pass.ok_or_else(|| Error::input("the recorded pass returned no logits"))
    }

    /// Runs the pass of [`single_tokens`](Self::single_tokens), for which the cache has pages.
    fn single_pass(
        pairs: &[(usize, &[u32])],
        (passes, kind): (&mut BTreeMap<usize, Pass>, &mut Passes),
        (model, cache): (&Llama, &mut KvCache),
        groups: &mut dyn ModelGroups,
    ) -> Result<()> {
        let Mixed { tokens, slots, .. } = Mixed::new(pairs, cache);
        let (compute, rotary) = (&*model.compute, &model.config.rotary);
        let pass = match passes.entry(tokens.len()) {
            Entry::Occupied(there) => {
                let pass = there.into_mut();
                compute.update_batch(&mut pass.part.batch, &tokens, &slots, rotary)?;
                pass
            }
            Entry::Vacant(free) => {
                let batch = compute.batch(&tokens, &slots, rotary)?;
                let part = MicroBatch { batch, rows: (0..tokens.len()).collect() };
                free.insert(Pass { recorded: None, part, logits: None })
            }
        };
        let ran_before = pass.logits.is_some();
        if *kind == Passes::Graph && ran_before && pass.recorded.is_none() {
            // Frees the memory of the last pass, so that the capture has all the memory that it needs.
            pass.logits = None;
            let (part, logits) = (slice::from_ref(&pass.part), &mut pass.logits);
            let mut recording = None;
            let collectives = groups.tensor().capture(|group| {
                let work = &mut || {
                    *logits = Some(model.logits(part, cache, group)?);
                    Ok(())
                };
                // SAFETY: the decoder keeps the model, batch, cache and logits at their addresses for as long as the graph, which
                // it drops first: the memory of the model and of the cache is never reallocated, even if the decoder is moved. It
                // alone uses the batch, the cache and the logits. The slots of the batch are in pages of the cache, which come from
                // its page tables. Only the group that captured the graph replays it, and not after it has failed.
                recording = unsafe { compute.capture(work) }?;
                Ok::<_, Error>(())
            });
            pass.recorded = match collectives {
                Ok(collectives) => recording.map(|recording| (recording, collectives)),
                Err(error) => {
                    tracing::warn!(%error, sequences = tokens.len(), "cannot capture a pass in a CUDA graph; no more are captured");
                    None
                }
            };
            if pass.recorded.is_none() {
                *kind = Passes::Eager;
            }
        }
        match &pass.recorded {
            Some((recording, collectives)) => groups.tensor().replay(collectives, || recording.replay())?,
            None => pass.logits = Some(model.logits(slice::from_ref(&pass.part), cache, groups)?),
        }
        synchronize(groups)
    }

    /// Appends tokens to several sequences in one pass, given as pairs of sequence and tokens: prompts, parts of prompts, next
    /// tokens. Returns the logits `[pairs, vocabulary]` in `f32` after the last token of each, in the order of the pairs. Every
    /// rank passes the same pairs.
    ///
    /// If each sequence gets one token, this is [`decode`](Self::decode). Otherwise the pass is never captured.
    ///
    /// # Errors
    /// Returns an error if there are no pairs, if one has no tokens, or if a sequence does not exist or occurs twice; a
    /// [`RequestError::CacheFull`] or [`RequestError::NoFreePages`] if there is no room for the tokens; otherwise the errors of
    /// [`Llama::forward`]. The sequences are then as before.
    pub fn step(&mut self, pairs: &[(usize, &[u32])], groups: &mut dyn ModelGroups) -> Result<&Tensor> {
        let sequences = pairs.len();
        if pairs.iter().any(|(_, tokens)| tokens.len() != 1) {
            let tokens: usize = pairs.iter().map(|(_, tokens)| tokens.len()).sum();
            let _span = tracing::info_span!("prefill", sequences, tokens).entered();
            return self.pass(pairs, groups);
        }
        let _span = tracing::info_span!("decode", sequences).entered();
        if self.model.stage().count > 1 {
            self.pass(pairs, groups)
        } else {
            self.single_tokens(pairs, groups)
        }
    }

    /// Runs a pass that is never captured, with a micro-batch for each stage.
    fn pass(&mut self, pairs: &[(usize, &[u32])], groups: &mut dyn ModelGroups) -> Result<&Tensor> {
        let more = self.validate(pairs)?;
        let Self { cache, model, logits, .. } = self;
        *logits = None;
        cache.append(&more, |cache| {
            let micro_batch = |part: Range<usize>| {
                let Mixed { tokens, slots, last } = Mixed::new(&pairs[part], cache);
                let batch = model.compute.batch(&tokens, &slots, &model.config.rotary)?;
                Ok(MicroBatch { batch, rows: last })
            };
            let count = model.stage().count.min(pairs.len());
            let parts = cut(pairs.len(), count).map(micro_batch).collect::<Result<Vec<_>>>()?;
            *logits = Some(model.logits(&parts, cache, groups)?);
            synchronize(groups)
        })?;
        logits.as_ref().ok_or_else(|| Error::input("the pass returned no logits"))
    }

    /// Checks the pairs of a request. Returns the number of tokens of each sequence.
    fn validate(&self, pairs: &[(usize, &[u32])]) -> Result<Vec<(usize, usize)>> {
        if pairs.is_empty() {
            return Err(RequestError::NoSequences.into());
        }
        for (_, tokens) in pairs {
            if tokens.is_empty() {
                return Err(RequestError::NoTokens.into());
            }
            self.model.check(tokens)?;
        }
        let mut sequences: Vec<usize> = pairs.iter().map(|(sequence, _)| *sequence).collect();
        sequences.sort_unstable();
        if let Some(twice) = sequences.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(RequestError::RepeatedSequence { sequence: twice[0] }.into());
        }
        Ok(pairs.iter().map(|(sequence, tokens)| (*sequence, tokens.len())).collect())
    }

    /// Removes a sequence, so that another can take its number.
    pub fn clear(&mut self, sequence: usize) {
        self.cache.truncate(sequence, 0);
    }

    /// Removes all but the first `length` positions of a sequence. A shorter sequence is unchanged.
    pub fn truncate(&mut self, sequence: usize, length: usize) {
        self.cache.truncate(sequence, length);
    }

    /// Replaces the content of sequence `to` by the first `length` positions of sequence `from`, as [`KvCache::fork`] does: for prompts
    /// with a common prefix, and for several answers to one prompt.
    ///
    /// # Errors
    /// Returns an error if there is no such sequence, or `from` holds fewer positions.
    pub fn fork(&mut self, from: usize, to: usize, length: usize) -> Result<()> {
        self.cache.fork(from, to, length)
    }

    /// Returns the number of cached positions of a sequence, or 0 if there is no such sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.cache.len(sequence)
    }

    /// Returns true if no sequence has cached positions.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }

    /// Returns the number of [free pages](KvCache::free_pages) of the cache.
    pub fn free_pages(&self) -> usize {
        self.cache.free_pages()
    }
}

/// The tokens of a pass in which sequences may have several, in the order of the slots: single tokens first.
struct Mixed {
    tokens: Vec<u32>,
    slots: SlotMapping,
    /// The row of each pair's last token, in the order of the pairs.
    last: Vec<usize>,
}

impl Mixed {
    /// Arranges the tokens of pairs, for which the cache has pages.
    fn new(pairs: &[(usize, &[u32])], cache: &KvCache) -> Self {
        let (mut order, longer): (Vec<_>, Vec<_>) = (0..pairs.len()).partition(|i| pairs[*i].1.len() == 1);
        order.extend(longer);
        let (mut all, mut last) = (Vec::new(), vec![0; pairs.len()]);
        for i in &order {
            all.extend_from_slice(pairs[*i].1);
            last[*i] = all.len() - 1;
        }
        let slots = cache.slots(order.iter().map(|i| (pairs[*i].0, pairs[*i].1.len())));
        Self { tokens: all, slots, last }
    }
}
