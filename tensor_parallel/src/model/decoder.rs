//! Decoding of several sequences.

#![expect(unsafe_code, reason = "a recorded pass keeps addresses; the block says why they stay")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::{Deref, Range};
use std::slice;
use std::sync::Arc;

use ryzanstein_process_group::{CapturedCalls, DType};

use super::groups::{ModelGroups, synchronize};
use super::llama::{Llama, MicroBatch, Output};
use super::stage::cut;
use crate::argmax::{choose, pick};
use crate::attention::{CacheSize, KvCache};
use crate::compute::{CHOSEN, CapturedGraph, SlotMapping};
use crate::error::{Error, RequestError, Result};
use crate::gpu::Download;
use crate::tensor::Tensor;

/// Sequences that grow token by token, several in one pass.
///
/// On a GPU, a pass of one token for each of n sequences runs normally the first time, is captured in a CUDA graph the second
/// time, and is replayed from then on, for any n sequences: one launch in place of hundreds, with the same result. Each n has its
/// own graph and memory. Pass the same groups to every call, and keep them alive longer than the decoder: NCCL keeps the
/// communicators that a graph may call. When a sequence has ended, [`clear`](Self::clear) makes room for another. Graphs stay valid
/// whatever happens to sequences and pages. Greedy passes have graphs of their own. Passes through several pipeline stages are not
/// captured, because the stages process different parts of them.
///
/// With P pipeline stages, the sequences of a pass are divided into P micro-batches, or one for each sequence if there are fewer,
/// so that the stages compute at the same time.
///
/// Every rank makes the same calls, also of [`fork`](Self::fork), [`truncate`](Self::truncate) and [`clear`](Self::clear), and gets the
/// same bits.
///
/// It owns its shard of the model `M`, so an engine can keep it in a struct and move it to a thread.
#[derive(Debug)]
pub struct Decoder<M = Arc<Llama>> {
    // First, so that the graphs are dropped before the memory whose addresses they contain: their own, the cache's, the model's.
    passes: BTreeMap<(usize, Output), Pass>,
    cache: KvCache,
    model: M,
    kind: Passes,
    /// The result of the newest pass.
    newest: Option<Newest>,
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
    result: Option<Arc<Tensor>>,
}

/// The result of a pass.
#[derive(Debug)]
struct Newest {
    /// The sequence of each row.
    sequences: Vec<usize>,
    output: Output,
    rows: Arc<Tensor>,
}

impl Newest {
    /// Returns the row of a sequence for which the pass chose a token.
    fn row_of(&self, sequence: usize) -> Option<usize> {
        let row = self.sequences.iter().position(|there| *there == sequence);
        row.filter(|_| self.output == Output::Candidates)
    }

    /// Returns the token that a row chooses, or, if a GPU has the candidates, the number of the row with [`CHOSEN`].
    fn token(&self, row: usize) -> Result<u32> {
        if self.rows.device().is_some() {
            return Ok(CHOSEN | row as u32);
        }
        let columns = self.rows.columns();
        // [`GreedyPass::wait`] checks its logit.
        Ok(pick(&self.rows.values()?[row * columns..(row + 1) * columns]).0)
    }
}

/// The tokens that a sequence gets in a [greedy pass](Decoder::start_greedy): a prompt, a part of one, or the next token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextTokens<'a> {
    /// These tokens.
    Known(&'a [u32]),
    /// The token that the previous pass chose for this sequence, which must have been in it. Nobody need have waited for it.
    Chosen,
}

/// A pass that chooses tokens, perhaps still running. Made by [`Decoder::start_greedy`]. It may be dropped without a wait.
#[derive(Debug)]
pub struct GreedyPass {
    rows: usize,
    candidates: Candidates,
}

#[derive(Debug)]
enum Candidates {
    Here(Arc<Tensor>),
    Coming(Download),
}

impl GreedyPass {
    /// Waits for the tokens, in the order of the pairs, at most until the timeout of the groups. Pass the groups that ran the pass. A later
    /// pass may still run. A sequence has an error in place of a token if one of its logits is NaN or the greatest is infinite: values
    /// have overflowed, or the weights are damaged. The other sequences are right; [`clear`](Decoder::clear) this one.
    ///
    /// # Errors
    /// Returns an error if a group has failed.
    pub fn wait(self, groups: &mut dyn ModelGroups) -> Result<Vec<Result<u32>>> {
        let values = match &self.candidates {
            Candidates::Here(candidates) => &candidates.values()?[..],
            Candidates::Coming(download) => {
                if let Some(event) = download.event() {
                    groups.tensor().synchronize_event(event)?;
                }
                download.values()?
            }
        };
        Ok(values.chunks_exact((values.len() / self.rows.max(1)).max(1)).map(choose).collect())
    }
}

/// The tokens that a sequence gets.
#[derive(Clone, Copy)]
enum Tokens<'a> {
    Given(&'a [u32]),
    /// A token that the previous pass chose, or [`CHOSEN`] with the row of the newest candidates from which the GPU takes it.
    Chosen(u32),
}

impl Deref for Tokens<'_> {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Self::Given(tokens) => tokens,
            Self::Chosen(token) => slice::from_ref(token),
        }
    }
}

impl Tokens<'_> {
    fn is_chosen(&self) -> bool {
        matches!(self, Self::Chosen(token) if token & CHOSEN != 0)
    }
}

/// Sequences with the tokens that they get.
type Pairs<'a> = [(usize, Tokens<'a>)];

/// Returns true if the GPU chooses tokens of a pass.
fn has_chosen(pairs: &Pairs<'_>) -> bool {
    pairs.iter().any(|(_, tokens)| tokens.is_chosen())
}

/// Waits for the result of a pass, or starts to copy candidates from a GPU.
fn finished(
    rows: Arc<Tensor>,
    output: Output,
    model: &Llama,
    groups: &mut dyn ModelGroups,
) -> Result<(Arc<Tensor>, Option<Download>)> {
    if output == Output::Candidates && model.stage().count > 1 {
        let tokens = 0..rows.columns();
        let candidates = model.compute.argmax(&rows, tokens)?;
        synchronize(groups)?;
        let values = candidates.values()?.into_owned();
        return Ok((Arc::new(Tensor::new(candidates.shape(), values, DType::F32)?), None));
    }
    if let (Output::Candidates, Some(array)) = (output, rows.device()) {
        let coming = Download::start(array)?;
        return Ok((rows, Some(coming)));
    }
    synchronize(groups).map(|()| (rows, None))
}

impl Llama {
    /// Creates a decoder with a KV cache of this size.
    ///
    /// # Errors
    /// Returns an error if the model does not support sequences of that length, or memory runs out.
    pub fn decoder(self: &Arc<Self>, size: CacheSize, passes: Passes) -> Result<Decoder> {
        Decoder::new(Arc::clone(self), size, passes)
    }
}

impl<M: Deref<Target = Llama>> Decoder<M> {
    /// Creates a decoder. `M` must always dereference to the same model, as an `Arc` or a reference does.
    pub(crate) fn new(model: M, size: CacheSize, passes: Passes) -> Result<Self> {
        let cache = model.cache(size)?;
        Ok(Self { passes: BTreeMap::new(), cache, model, kind: passes, newest: None })
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
    /// Returns the errors of [`step`](Self::step).
    pub fn decode(&mut self, tokens: &[(usize, u32)], groups: &mut dyn ModelGroups) -> Result<&Tensor> {
        let pairs: Vec<_> =
            tokens.iter().map(|(at, token)| (*at, Tokens::Given(slice::from_ref(token)))).collect();
        Ok(&self.run(&pairs, Output::Logits, groups)?.0.rows)
    }

    /// Appends tokens to several sequences in one pass, given as pairs of sequence and tokens: prompts, parts of prompts, next
    /// tokens. Returns the logits `[pairs, vocabulary]` in `f32` after the last token of each, in the order of the pairs. Every
    /// rank passes the same pairs.
    ///
    /// If each sequence gets one token, this is [`decode`](Self::decode). Otherwise the pass is never captured.
    ///
    /// # Errors
    /// Returns an error if there are no pairs, if one has no tokens, if a sequence does not exist or occurs twice, if a token is not in
    /// the vocabulary, or if a group fails; a [`RequestError::CacheFull`] or [`RequestError::NoFreePages`] if there is no room for the
    /// tokens. The sequences are then as before.
    pub fn step(&mut self, pairs: &[(usize, &[u32])], groups: &mut dyn ModelGroups) -> Result<&Tensor> {
        let pairs: Vec<_> =
            pairs.iter().map(|(sequence, tokens)| (*sequence, Tokens::Given(tokens))).collect();
        Ok(&self.run(&pairs, Output::Logits, groups)?.0.rows)
    }

    /// Appends tokens to a sequence, as [`prefill`](Self::prefill) does. Returns the logits `[tokens, vocabulary]` in `f32` after each of
    /// them. The pass is never captured.
    ///
    /// # Errors
    /// Returns the errors of [`step`](Self::step).
    pub fn logits(
        &mut self,
        sequence: usize,
        tokens: &[u32],
        groups: &mut dyn ModelGroups,
    ) -> Result<&Tensor> {
        Ok(&self.run(&[(sequence, Tokens::Given(tokens))], Output::AllLogits, groups)?.0.rows)
    }

    /// Starts a greedy [`step`](Self::step): it chooses the most likely next token of each sequence, the lowest of a tie, and returns no
    /// logits. Ranks exchange candidates, a few numbers for each sequence, and only those come to the host.
    ///
    /// On a GPU it returns before the tokens are known. Start the next pass at once, with [`NextTokens::Chosen`] for sequences of this one
    /// and [`NextTokens::Known`] for new prompts, then [wait](GreedyPass::wait) for this one: the GPU then need not wait for the host. If
    /// the awaited token ends a sequence, the pass already started has appended it: [`clear`](Self::clear) the sequence and ignore its
    /// row, or [`truncate`](Self::truncate) it by one to go on. Leave a sequence out once it is full. After a part of a prompt, ignore the
    /// token. On CPUs, and with several pipeline stages, the pass is done when this returns; stages exchange all logits.
    ///
    /// # Errors
    /// Returns the errors of [`step`](Self::step), or a [`RequestError::NothingChosen`] for a sequence that was not in the previous pass,
    /// or was cleared or replaced since. If a group fails during the pass, [`GreedyPass::wait`] or a later call returns the error.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use ryzanstein_tensor_parallel::{Decoder, NextTokens, Result};
    /// # use ryzanstein_process_group::ProcessGroup;
    /// # fn run(decoder: &mut Decoder, prompt: &[u32], group: &mut ProcessGroup) -> Result<()> {
    /// let mut pass = decoder.start_greedy(&[(0, NextTokens::Known(prompt))], group)?;
    /// for _ in 0..100 {
    ///     let next = decoder.start_greedy(&[(0, NextTokens::Chosen)], group)?;
    ///     println!("{:?}", pass.wait(group)?);
    ///     pass = next;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn start_greedy(
        &mut self,
        pairs: &[(usize, NextTokens<'_>)],
        groups: &mut dyn ModelGroups,
    ) -> Result<GreedyPass> {
        let pairs = pairs.iter().map(|pair| self.resolve(*pair)).collect::<Result<Vec<_>>>()?;
        let rows = pairs.len();
        let (newest, coming) = self.run(&pairs, Output::Candidates, groups)?;
        let candidates =
            coming.map_or_else(|| Candidates::Here(Arc::clone(&newest.rows)), Candidates::Coming);
        Ok(GreedyPass { rows, candidates })
    }

    /// Returns true if [`start_greedy`](Self::start_greedy) returns before the tokens are known. Then start the next pass before waiting
    /// for this one. The same on every rank.
    pub fn is_asynchronous(&self) -> bool {
        self.cache.is_on_device() && self.model.stage().count == 1
    }

    /// Returns what a sequence gets.
    fn resolve<'a>(&self, (sequence, tokens): (usize, NextTokens<'a>)) -> Result<(usize, Tokens<'a>)> {
        if let NextTokens::Known(tokens) = tokens {
            return Ok((sequence, Tokens::Given(tokens)));
        }
        let chosen = self.newest.as_ref().and_then(|newest| Some((newest, newest.row_of(sequence)?)));
        let (newest, row) = chosen.ok_or(RequestError::NothingChosen { sequence })?;
        Ok((sequence, Tokens::Chosen(newest.token(row)?)))
    }

    /// Runs a pass. Waits for logits; candidates on a GPU are still to come.
    fn run(
        &mut self,
        pairs: &Pairs<'_>,
        output: Output,
        groups: &mut dyn ModelGroups,
    ) -> Result<(&Newest, Option<Download>)> {
        let sequences = pairs.len();
        let is_single = pairs.iter().all(|(_, tokens)| tokens.len() == 1);
        let _span = if is_single {
            tracing::info_span!("decode", sequences).entered()
        } else {
            let tokens: usize = pairs.iter().map(|(_, tokens)| tokens.len()).sum();
            tracing::info_span!("prefill", sequences, tokens).entered()
        };
        let more = self.validate(pairs)?;
        let Self { passes, cache, model, kind, newest } = self;
        let model = &**model;
        let (rows, coming) = cache.append(&more, |cache| {
            // Otherwise its memory is free for this pass.
            if !has_chosen(pairs) {
                *newest = None;
            }
            let chosen = newest.as_ref().map(|newest| &*newest.rows);
            let rows = if is_single && output != Output::AllLogits && model.stage().count == 1 {
                Self::single_pass((pairs, chosen), output, (passes, kind), (model, cache), groups)?
            } else {
                Arc::new(Self::pass((pairs, chosen), output, (model, cache), groups)?)
            };
            finished(rows, output, model, groups)
        })?;
        let sequences = pairs.iter().map(|(sequence, _)| *sequence).collect();
        Ok((newest.insert(Newest { sequences, output, rows }), coming))
    }

    /// Runs a pass of one token for each sequence, for which the cache has pages. With [`Passes::Graph`], the second one of a size is
    /// captured.
    fn single_pass(
        (pairs, newest): (&Pairs<'_>, Option<&Tensor>),
        output: Output,
        (passes, kind): (&mut BTreeMap<(usize, Output), Pass>, &mut Passes),
        (model, cache): (&Llama, &mut KvCache),
        groups: &mut dyn ModelGroups,
    ) -> Result<Arc<Tensor>> {
        let Mixed { tokens, slots, .. } = Mixed::new(pairs, cache);
        let (compute, rotary) = (&*model.compute, &model.config.rotary);
        let pass = match passes.entry((tokens.len(), output)) {
            Entry::Occupied(there) => {
                let pass = there.into_mut();
                compute.update_batch(&mut pass.part.batch, &tokens, &slots, rotary)?;
                pass
            }
            Entry::Vacant(free) => {
                let batch = compute.batch(&tokens, &slots, rotary)?;
                let part = MicroBatch { batch, rows: (0..tokens.len()).collect() };
                free.insert(Pass { recorded: None, part, result: None })
            }
        };
        if let Some(newest) = newest {
            compute.choose_tokens(&mut pass.part.batch, newest)?;
        }
        let ran_before = pass.result.is_some();
        if *kind == Passes::Graph && ran_before && pass.recorded.is_none() {
            // Frees the memory of the last pass, so that the capture has all the memory that it needs.
            pass.result = None;
            let (part, result) = (slice::from_ref(&pass.part), &mut pass.result);
            let mut recording = None;
            let collectives = groups.tensor().capture(|group| {
                let work = &mut || {
                    *result = Some(Arc::new(model.output(part, output, cache, group)?));
                    Ok(())
                };
                // SAFETY: the decoder keeps the model, batch, cache and result at their addresses for as long as the graph, which
                // it drops first: the memory of the model and of the cache is never reallocated, even if the decoder is moved. It
                // alone uses the batch, the cache and the result, or others only read the result in the order of the stream. The
                // slots of the batch are in pages of the cache, which come from its page tables. Only the group that captured the
                // graph replays it, and not after it has failed.
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
        if let (Some((recording, collectives)), Some(result)) = (&pass.recorded, &pass.result) {
            groups.tensor().replay(collectives, || recording.replay())?;
            return Ok(Arc::clone(result));
        }
        let result = Arc::new(model.output(slice::from_ref(&pass.part), output, cache, groups)?);
        Ok(Arc::clone(pass.result.insert(result)))
    }

    /// Runs a pass that is never captured, with a micro-batch for each stage. The cache has pages for it.
    fn pass(
        (pairs, newest): (&Pairs<'_>, Option<&Tensor>),
        output: Output,
        (model, cache): (&Llama, &mut KvCache),
        groups: &mut dyn ModelGroups,
    ) -> Result<Tensor> {
        let micro_batch = |part: Range<usize>| {
            let Mixed { tokens, slots, last } = Mixed::new(&pairs[part], cache);
            let mut batch = model.compute.batch(&tokens, &slots, &model.config.rotary)?;
            if let Some(newest) = newest {
                model.compute.choose_tokens(&mut batch, newest)?;
            }
            let rows = if output == Output::AllLogits { (0..tokens.len()).collect() } else { last };
            Ok(MicroBatch { batch, rows })
        };
        let count = model.stage().count.min(pairs.len());
        let parts = cut(pairs.len(), count).map(micro_batch).collect::<Result<Vec<_>>>()?;
        // The candidates would be those of the last stage alone.
        let output = if model.stage().count > 1 { Output::Logits } else { output };
        model.output(&parts, output, cache, groups)
    }

    /// Checks the pairs of a request. Returns the number of tokens of each sequence.
    fn validate(&self, pairs: &Pairs<'_>) -> Result<Vec<(usize, usize)>> {
        if pairs.is_empty() {
            return Err(RequestError::NoSequences.into());
        }
        for (_, tokens) in pairs {
            if tokens.is_empty() {
                return Err(RequestError::NoTokens.into());
            }
            if !tokens.is_chosen() {
                self.model.check(tokens)?;
            }
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
        self.forget_choice(sequence);
        self.cache.truncate(sequence, 0);
    }

    /// Forgets what the newest pass has chosen for a sequence.
    fn forget_choice(&mut self, sequence: usize) {
        let sequences = self.newest.iter_mut().flat_map(|newest| &mut newest.sequences);
        sequences.filter(|there| **there == sequence).for_each(|there| *there = usize::MAX);
    }

    /// Removes all but the first `length` positions of a sequence. A shorter sequence is unchanged. A token that the newest pass has
    /// [chosen](NextTokens::Chosen) for it stays chosen.
    pub fn truncate(&mut self, sequence: usize, length: usize) {
        self.cache.truncate(sequence, length);
    }

    /// Replaces the content of sequence `to` by the first `length` positions of sequence `from`: for prompts with a common prefix, and
    /// for several answers to one prompt. They share the pages. When one of them writes to a shared page, it first gets a copy of its
    /// own, which takes a free page. After a fork at a multiple of [`PAGE_SIZE`](crate::compute::PAGE_SIZE), no sequence that only grows
    /// needs a copy. No token is then [chosen](NextTokens::Chosen) for `to`.
    ///
    /// # Errors
    /// Returns an error if there is no such sequence, or `from` holds fewer positions.
    pub fn fork(&mut self, from: usize, to: usize, length: usize) -> Result<()> {
        self.cache.fork(from, to, length)?;
        self.forget_choice(to);
        Ok(())
    }

    /// Returns the number of cached positions of a sequence, or 0 if there is no such sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.cache.len(sequence)
    }

    /// Returns true if no sequence has cached positions.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }

    /// Returns the number of pages that no sequence holds. A sequence takes them as it grows, and one when it writes to a page that it
    /// shares.
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
    fn new(pairs: &Pairs<'_>, cache: &KvCache) -> Self {
        let (mut order, longer): (Vec<_>, Vec<_>) = (0..pairs.len()).partition(|i| pairs[*i].1.len() == 1);
        order.extend(longer);
        let (mut all, mut last) = (Vec::new(), vec![0; pairs.len()]);
        for i in &order {
            all.extend_from_slice(&pairs[*i].1);
            last[*i] = all.len() - 1;
        }
        let slots = cache.slots(order.iter().map(|i| (pairs[*i].0, pairs[*i].1.len())));
        Self { tokens: all, slots, last }
    }
}
