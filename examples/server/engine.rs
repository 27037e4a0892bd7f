//! Continuous batching. Rank 0 leads: with a plan of one or several passes it tells the other ranks which sequences end and which tokens
//! are appended to which, so that all ranks make the same calls. Only rank 0 knows requests, samples tokens and makes text.

use std::mem::take;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use ryzanstein_process_group::{ProcessGroupManager, Rank};
use ryzanstein_tensor_parallel::compute::PAGE_SIZE;
use ryzanstein_tensor_parallel::generate::Sampler;
use ryzanstein_tensor_parallel::{CacheSize, Decoder, NextTokens, Result, Tensor, TextStream, Tokenizer};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::UnboundedSender;

const LEADER: Rank = Rank(0);

/// The most tokens of prompts in one pass. A longer prompt takes several passes, between which the running sequences go on.
const PROMPT_TOKENS: usize = 512;

/// A request, checked: its prompt and answer fit a sequence.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: usize,
    pub(crate) sampler: Sampler,
    /// The text ends before the first of these.
    pub(crate) stop: Vec<String>,
    /// Where the answer goes. It holds at most `max_tokens` events, so it needs no other bound. Closed: the client has left.
    pub(crate) events: UnboundedSender<Event>,
}

/// The pages of the KV cache that a request may need.
fn pages(prompt_tokens: usize, max_tokens: usize) -> usize {
    (prompt_tokens + max_tokens).div_ceil(PAGE_SIZE)
}

/// A part of an answer.
#[derive(Debug)]
pub(crate) enum Event {
    Text(String),
    End(Finish, Usage),
    Failed(String),
}

/// The reason for the end of an answer.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Finish {
    /// At a stop string, or a token that ends a text.
    Stop,
    Length,
}

/// Tokens of the prompt, and new ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    pub(crate) new: usize,
}

/// The next step of all ranks. Both lists may be empty: then it is a sign of life.
#[derive(Debug, Serialize, Deserialize)]
struct Plan {
    ended: Vec<usize>,
    tokens: Vec<(usize, Vec<u32>)>,
    /// The number of passes if all sequences take their most likely token: then no logits come to the host, and a GPU begins a pass
    /// before the host knows the tokens of the one before.
    greedy: Option<usize>,
}

/// What follows the last token of each sequence of a pass.
enum Next<'a> {
    Logits(&'a Tensor),
    Tokens(Vec<Result<u32>>),
}

impl Plan {
    /// Runs the passes, and calls `take` with what each gives.
    fn run(
        &self,
        decoder: &mut Decoder,
        manager: &mut ProcessGroupManager,
        mut take: impl FnMut(Next<'_>) -> Result<()>,
    ) -> Result<()> {
        for slot in &self.ended {
            decoder.clear(*slot);
        }
        let tokens = self.tokens.iter();
        if self.tokens.is_empty() {
            return Ok(());
        }
        let Some(passes) = self.greedy else {
            let pairs: Vec<_> = tokens.map(|(slot, tokens)| (*slot, &tokens[..])).collect();
            return take(Next::Logits(decoder.step(&pairs, manager)?));
        };
        let known: Vec<_> = tokens.map(|(slot, tokens)| (*slot, NextTokens::Known(tokens))).collect();
        let chosen: Vec<_> = known.iter().map(|(slot, _)| (*slot, NextTokens::Chosen)).collect();
        let mut pass = decoder.start_greedy(&known, manager)?;
        for _ in 1..passes {
            let next = decoder.start_greedy(&chosen, manager)?;
            take(Next::Tokens(pass.wait(manager)?))?;
            pass = next;
        }
        take(Next::Tokens(pass.wait(manager)?))
    }
}

/// Gives all ranks the leader's plan; `None` ends the job. Not measured: it would look slow, as ranks wait in it for work.
fn share(plan: Option<&Option<Plan>>, manager: &mut ProcessGroupManager) -> Result<Option<Plan>> {
    Ok(manager.world().without_profiling(|group| group.broadcast_object(plan, LEADER))?)
}

/// Follows the plans of rank 0, on every other rank, until there is none.
pub(crate) fn follow(decoder: &mut Decoder, manager: &mut ProcessGroupManager) -> Result<()> {
    while let Some(plan) = share(None, manager)? {
        plan.run(decoder, manager, |_| Ok(()))?;
    }
    Ok(())
}

/// A sequence that has a slot of the decoder.
struct Running<'a> {
    job: Job,
    /// Tokens that the model has not seen yet: the rest of the prompt, later the newest token.
    next: Vec<u32>,
    text: TextStream<'a>,
    prompt_tokens: usize,
    made: usize,
}

/// Rank 0: which request is in which slot.
pub(crate) struct Leader<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens that end a text.
    end_tokens: Vec<u32>,
    requests: Receiver<Job>,
    /// The next request, while there are too few pages for it.
    waiting: Option<Job>,
    heartbeat: Duration,
    slots: Vec<Option<Running<'a>>>,
    /// The pages of the KV cache.
    pages: usize,
    /// The most passes of a plan.
    passes: usize,
    ended: Vec<usize>,
}

impl<'a> Leader<'a> {
    /// The other ranks wait for plans in a broadcast, whose deadline is `timeout`, the group's. So even an idle leader sends a
    /// plan each second, or four times within a shorter deadline. They sleep meanwhile, and a lost rank is noticed.
    pub(crate) fn new(
        tokenizer: &'a Tokenizer,
        end_tokens: Vec<u32>,
        requests: Receiver<Job>,
        (CacheSize { sequences, pages, .. }, passes): (CacheSize, usize),
        timeout: Duration,
    ) -> Self {
        let heartbeat = (timeout / 4).min(Duration::from_secs(1));
        let slots = (0..sequences).map(|_| None).collect();
        let (waiting, ended) = (None, Vec::new());
        Self { tokenizer, end_tokens, requests, waiting, heartbeat, slots, pages, passes, ended }
    }

    /// Answers requests until no more can come and all are answered. Then all ranks leave.
    pub(crate) fn lead(mut self, decoder: &mut Decoder, manager: &mut ProcessGroupManager) -> Result<()> {
        let outcome = self.passes(decoder, manager);
        if let Err(error) = &outcome {
            for running in self.slots.iter().flatten() {
                running.tell(Event::Failed(error.to_string()));
            }
        }
        outcome
    }

    fn passes(&mut self, decoder: &mut Decoder, manager: &mut ProcessGroupManager) -> Result<()> {
        loop {
            self.drop_abandoned();
            let more_may_come = self.admit();
            let is_done = self.is_idle() && !more_may_come;
            let tokens = self.next_tokens();
            let greedy = self.greedy_passes(&tokens);
            let plan = (!is_done).then(|| Plan { ended: take(&mut self.ended), tokens, greedy });
            let Some(plan) = share(Some(&plan), manager)? else { return Ok(()) };
            let mut seen: Vec<_> = plan.tokens.iter().map(|(slot, tokens)| (*slot, tokens.len())).collect();
            plan.run(decoder, manager, |next| {
                match next {
                    Next::Logits(logits) => {
                        let values = logits.values()?;
                        for ((slot, seen), logits) in seen.iter().zip(values.chunks_exact(logits.columns())) {
                            self.advance(*slot, *seen, |sampler| sampler.choose(logits));
                        }
                    }
                    Next::Tokens(chosen) => {
                        for ((slot, seen), token) in seen.iter_mut().zip(chosen) {
                            self.advance(*slot, std::mem::replace(seen, 1), |_| token);
                        }
                    }
                }
                Ok(())
            })?;
        }
    }

    /// The number of passes of a plan if all sequences take their most likely token: one while a prompt is unfinished, otherwise at most
    /// as many as every answer may still have tokens. An answer may end earlier; its later tokens are ignored.
    fn greedy_passes(&self, tokens: &[(usize, Vec<u32>)]) -> Option<usize> {
        let running = self.slots.iter().flatten();
        if !running.clone().all(|running| running.job.sampler.is_greedy()) {
            return None;
        }
        let given: usize = tokens.iter().map(|(_, tokens)| tokens.len()).sum();
        let left: usize = running.clone().map(|running| running.next.len()).sum();
        let most = running.map(|running| running.job.max_tokens - running.made).min();
        Some(if given < left { 1 } else { self.passes.min(most.unwrap_or(1)) })
    }

    /// The pages that no running request may need.
    fn free_pages(&self) -> usize {
        let running = self.slots.iter().flatten();
        self.pages
            - running.map(|running| pages(running.prompt_tokens, running.job.max_tokens)).sum::<usize>()
    }

    fn is_idle(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }

    /// Frees the slots of clients that have left.
    fn drop_abandoned(&mut self) {
        for (slot, place) in self.slots.iter_mut().enumerate() {
            let Some(running) = place.take_if(|running| running.job.events.is_closed()) else { continue };
            let Running { made, job: Job { max_tokens, .. }, .. } = running;
            tracing::info!("a client has left after {made} of {max_tokens} tokens; its slot {slot} is free");
            self.ended.push(slot);
        }
    }

    /// Fills free slots with waiting requests, as long as there are pages for all at full length. If nothing runs, waits for one, at
    /// most until the next sign of life. Returns whether more may come.
    fn admit(&mut self) -> bool {
        while let Some(slot) = self.slots.iter().position(Option::is_none) {
            let wait = if self.is_idle() { self.heartbeat } else { Duration::ZERO };
            match self.waiting.take().map_or_else(|| self.requests.recv_timeout(wait), Ok) {
                // It has left while it waited.
                Ok(job) if job.events.is_closed() => {}
                Ok(job) if pages(job.prompt.len(), job.max_tokens) > self.free_pages() => {
                    self.waiting = Some(job);
                    return true;
                }
                Ok(job) => self.slots[slot] = Some(Running::new(job, self.tokenizer)),
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        true
    }

    /// The tokens of the next pass: one of each running sequence, and prompts up to their limit.
    fn next_tokens(&self) -> Vec<(usize, Vec<u32>)> {
        let mut room = PROMPT_TOKENS;
        let mut tokens = Vec::new();
        for (slot, running) in self.slots.iter().enumerate() {
            let Some(Running { next, .. }) = running else { continue };
            let count = if next.len() == 1 { 1 } else { next.len().min(room) };
            if next.len() > 1 {
                room -= count;
            }
            if count > 0 {
                tokens.push((slot, next[..count].to_vec()));
            }
        }
        tokens
    }

    /// Notes that `seen` tokens of a sequence have been computed. Once none are left, appends the one that `choose` returns.
    fn advance(&mut self, slot: usize, seen: usize, choose: impl FnOnce(&mut Sampler) -> Result<u32>) {
        let Some(running) = &mut self.slots[slot] else { return };
        running.next.drain(..seen);
        if !running.next.is_empty() {
            // The rest of the prompt is still to come, and this token says nothing.
            return;
        }
        let token = choose(&mut running.job.sampler);
        let outcome = token.and_then(|token| running.push(token, &self.end_tokens));
        let Some(outcome) = outcome.transpose() else { return };
        if let Some(running) = self.slots[slot].take() {
            running.end(outcome);
        }
        self.ended.push(slot);
    }
}

impl<'a> Running<'a> {
    fn new(mut job: Job, tokenizer: &'a Tokenizer) -> Self {
        let next = take(&mut job.prompt);
        let text = TextStream::new(tokenizer, &next, &job.stop);
        Self { job, text, prompt_tokens: next.len(), next, made: 0 }
    }

    /// Appends a token and sends the text that is certain with it. Returns why the answer has ended, if it has.
    fn push(&mut self, token: u32, end_tokens: &[u32]) -> Result<Option<Finish>> {
        self.next.push(token);
        self.made += 1;
        if end_tokens.contains(&token) {
            return Ok(Some(Finish::Stop));
        }
        let text = self.text.push(token)?;
        if !text.is_empty() {
            self.tell(Event::Text(text));
        }
        if self.text.is_ended() {
            return Ok(Some(Finish::Stop));
        }
        Ok((self.made == self.job.max_tokens).then_some(Finish::Length))
    }

    /// Sends the rest of the text, and why there is no more.
    fn end(self, outcome: Result<Finish>) {
        let Self { job, text, prompt_tokens, made, .. } = self;
        let usage = Usage { prompt: prompt_tokens, new: made };
        let events = match outcome.and_then(|finish| Ok((text.finish()?, finish))) {
            Ok((rest, finish)) => vec![Event::Text(rest), Event::End(finish, usage)],
            Err(error) => vec![Event::Failed(error.to_string())],
        };
        for event in events {
            let _ = job.events.send(event);
        }
    }

    fn tell(&self, event: Event) {
        // It fails if the client has left, which the next plan finds.
        let _ = self.job.events.send(event);
    }
}
