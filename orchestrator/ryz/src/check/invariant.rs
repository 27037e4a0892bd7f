//! Invariant numerics: one small model on every number of ranks that the job allows.

use std::collections::BTreeSet;
use std::sync::Arc;

use ryzanstein_benches::suite::steps::{self, ModelShape};
use ryzanstein_config::Numerics;
use ryzanstein_orchestrator::table::{self, Cell, Column, Screen};
use ryzanstein_process_group::{DType, ProcessGroup, ProcessGroupManager, Rank};
use ryzanstein_tensor_parallel::compute;
use ryzanstein_tensor_parallel::generate::Sampler;
use ryzanstein_tensor_parallel::{
    CacheSize, ConfigurationError, Error, Llama, LlamaConfig, Passes, Sampling, legal_world_sizes,
};

use super::tone;
use crate::generate::logits_digest;

const DTYPE: DType = DType::BF16;
const VOCABULARY: usize = 250;
const LAYERS: usize = 2;
/// Tokens whose logits are compared, and the length of the chunks in which they are given a second time.
const TOKENS: usize = 100;
const CHUNK: usize = 7;
/// Sequences that are decoded together, and tokens that each gets.
const SEQUENCES: usize = 4;
const NEW_TOKENS: usize = 16;

/// The digests of one number of ranks.
struct Digests {
    ranks: usize,
    /// One digest if all ways to compute the same logits agree.
    digests: BTreeSet<String>,
}

/// Computes the same logits on 1, 2, 4 and 8 ranks, as many as there are, whole, in chunks and in a batch. Returns the report, and
/// true if all have the same digest. Every rank calls this.
pub(super) fn compare(manager: &mut ProcessGroupManager, screen: Screen) -> Result<(String, bool), Error> {
    let world = manager.world();
    let arithmetic = compute::arithmetic(world);
    let all = world.all_gather_object(&arithmetic)?;
    if let Some(other) = all.iter().position(|other| *other != arithmetic) {
        let (rank, other) = (Rank(other as u32), world.rank());
        let theirs = all[rank.index()].clone();
        return Err(ConfigurationError::DifferentArithmetic { rank, theirs, other, mine: arithmetic }.into());
    }
    let config = config()?;
    let sizes = legal_world_sizes(&config, manager.roster().world_size(), Numerics::Invariant);
    let mut found = Vec::new();
    for ranks in sizes {
        let members: Vec<Rank> = Rank::all(ranks).collect();
        let mine = match manager.new_group(&members)? {
            Some(mut group) => Some(digests(&config, Numerics::Invariant, &mut group)?),
            None => None,
        };
        let all = manager.world().all_gather_object(&mine)?;
        found.push(Digests { ranks, digests: all.into_iter().flatten().flatten().collect() });
    }
    let all: BTreeSet<&String> = found.iter().flat_map(|of| &of.digests).collect();
    let same = all.len() == 1;
    let rows: Vec<Vec<Cell>> = found
        .iter()
        .map(|of| {
            let digests: Vec<&str> = of.digests.iter().map(String::as_str).collect();
            vec![of.ranks.to_string().into(), digests.join(" ").into()]
        })
        .collect();
    let columns = [Column::right("ranks"), Column::left("SHA-256 of the logits")];
    let verdict = match (same, rows.len()) {
        (false, _) => "THE BITS DIFFER",
        (true, 1) => "one size only: nothing to compare with; start 2, 4 or 8 ranks",
        (true, _) => "the same bits at every size",
    };
    let head = format!(
        "Invariant numerics, {DTYPE}, {arithmetic}: {TOKENS} tokens, whole and in chunks of {CHUNK}; {NEW_TOKENS} greedy tokens, alone and \
         with {} other sequences:",
        SEQUENCES - 1
    );
    let verdict = screen.paint(tone(same), verdict);
    Ok((
        format!("{}\n{}{verdict}\n", table::wrap(&head, 0, screen), table::table(&columns, &rows, screen)),
        same,
    ))
}

/// Returns the digests of all logits, each computed in several ways; one digest if the ways agree.
fn digests(
    config: &LlamaConfig,
    numerics: Numerics,
    group: &mut ProcessGroup,
) -> Result<BTreeSet<String>, Error> {
    group.set_numerics(numerics);
    let model = steps::load(config, DTYPE, group)?;
    let tokens: Vec<u32> = (0..TOKENS).map(|at| (at * 37 % VOCABULARY) as u32).collect();
    let mut found = BTreeSet::new();
    for (chunk, sequences) in [(TOKENS, 1), (CHUNK, SEQUENCES)] {
        let mut logits = forced(&model, &tokens, chunk, group)?;
        logits.extend(greedy(&model, &tokens, sequences, group)?);
        found.insert(logits_digest(&logits));
    }
    Ok(found)
}

/// Returns the logits after each token.
fn forced(
    model: &Arc<Llama>,
    tokens: &[u32],
    chunk: usize,
    group: &mut ProcessGroup,
) -> Result<Vec<f32>, Error> {
    let mut decoder = model.decoder(CacheSize::full(1, tokens.len()), Passes::Eager)?;
    let mut logits = Vec::new();
    for part in tokens.chunks(chunk) {
        logits.extend_from_slice(&decoder.logits(0, part, group)?.values()?);
    }
    Ok(logits)
}

/// Returns the logits of the first sequence; others with prompts of other lengths are decoded with it.
fn greedy(
    model: &Arc<Llama>,
    tokens: &[u32],
    sequences: usize,
    group: &mut ProcessGroup,
) -> Result<Vec<f32>, Error> {
    let mut decoder = model.decoder(CacheSize::full(sequences, TOKENS + NEW_TOKENS), Passes::Graph)?;
    let mut sampler = Sampler::new(Sampling::Greedy)?;
    let prompts: Vec<_> = (0..sequences).map(|i| (i, &tokens[..TOKENS / (i + 1)])).collect();
    let mut seen = Vec::new();
    let mut logits = decoder.step(&prompts, group)?.values()?.into_owned();
    for _ in 0..NEW_TOKENS {
        seen.extend_from_slice(&logits[..VOCABULARY]);
        let chosen = logits.chunks_exact(VOCABULARY).map(|logits| sampler.choose(logits));
        let next: Vec<_> = chosen.collect::<Result<Vec<_>, _>>()?.into_iter().enumerate().collect();
        logits = decoder.decode(&next, group)?.values()?.into_owned();
    }
    Ok(seen)
}

/// A model whose sums are long enough to be rounded often.
fn config() -> Result<LlamaConfig, Error> {
    ModelShape::new("check", [256, 640, 8, 4], VOCABULARY / LAYERS).config(LAYERS)
}

#[cfg(test)]
mod tests {
    use ryzanstein_tests::on_loopback;

    use super::*;

    #[test]
    fn digests_are_equal_with_invariant_numerics_and_differ_with_fast_ones() {
        let config = config().unwrap();
        let on = |ranks, numerics| -> BTreeSet<String> {
            let of_ranks = on_loopback(ranks, |group| digests(&config, numerics, group).unwrap());
            of_ranks.into_iter().flatten().collect()
        };
        let alone = on(1, Numerics::Invariant);
        assert_eq!((alone.len(), &on(2, Numerics::Invariant)), (1, &alone));
        assert_ne!(on(2, Numerics::Fast), on(1, Numerics::Fast));
    }
}
