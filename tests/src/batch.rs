//! Sequences that are decoded together.

use std::slice;
use std::sync::Arc;

use ryzanstein_process_group::ProcessGroup;
use ryzanstein_tensor_parallel::{CacheSize, Decoder, GreedyPass, Llama, NextTokens, Passes};

use crate::fixtures::Expected;

/// Number of sequences decoded at once.
const SEQUENCES: usize = 3;

/// Decodes a fixture's text several times in one batch: begun at different places, paused now and then, given in changing
/// order, and each once more when it has ended. Gives the position and the logits of everything that was computed.
///
/// # Panics
/// When the model fails.
pub fn staggered(
    model: &Arc<Llama>,
    expected: &Expected,
    passes: Passes,
    group: &mut ProcessGroup,
) -> Vec<(usize, Vec<f32>)> {
    let input = expected.input();
    let mut decoder = model.decoder(CacheSize::full(SEQUENCES, input.len()), passes).unwrap();
    let mut seen = Vec::new();
    for (sequence, begun) in [1, 2, expected.prompt.len()].into_iter().enumerate() {
        let logits = decoder.prefill(sequence, &input[..begun], group).unwrap();
        seen.push((begun - 1, logits.values().unwrap().into_owned()));
    }
    let mut again = [true; SEQUENCES];
    for round in 0.. {
        for (sequence, again) in again.iter_mut().enumerate() {
            if decoder.len(sequence) == input.len() && std::mem::take(again) {
                decoder.clear(sequence);
                let logits = decoder.prefill(sequence, &input[..1], group).unwrap();
                seen.push((0, logits.values().unwrap().into_owned()));
            }
        }
        let open = (0..SEQUENCES).filter(|sequence| decoder.len(*sequence) < input.len());
        let mut tokens: Vec<_> = open.map(|sequence| (sequence, input[decoder.len(sequence)])).collect();
        if tokens.is_empty() {
            return seen;
        }
        if tokens.len() > 1 && round % 3 == 0 {
            tokens.remove(round / 3 % tokens.len());
        }
        let shift = round % tokens.len();
        tokens.rotate_left(shift);
        let positions: Vec<usize> = tokens.iter().map(|(sequence, _)| decoder.len(*sequence)).collect();
        let logits = decoder.decode(&tokens, group).unwrap();
        assert_eq!(logits.shape(), [tokens.len(), expected.vocabulary]);
        let values = logits.values().unwrap();
        let rows = values.chunks_exact(expected.vocabulary).map(<[f32]>::to_vec);
        seen.extend(positions.into_iter().zip(rows));
    }
    seen
}

/// Gives a fixture's text to four sequences by passes that give some of them one token and others several, with sequences that
/// are forked and truncated on the way. Gives the position and the logits after each last token.
///
/// # Panics
/// When the model fails.
pub fn mixed(
    model: &Arc<Llama>,
    expected: &Expected,
    passes: Passes,
    group: &mut ProcessGroup,
) -> Vec<(usize, Vec<f32>)> {
    let input = expected.input();
    let mut decoder = model.decoder(CacheSize::full(4, input.len()), passes).unwrap();
    let mut seen = Vec::new();
    // Decodes this many tokens of each sequence in a pass.
    let mut step = |decoder: &mut Decoder, more: &[(usize, usize)]| {
        let lengths = more.iter().map(|(sequence, _)| decoder.len(*sequence));
        let ranges: Vec<_> = lengths.zip(more).map(|(length, (_, more))| length..length + more).collect();
        let pairs: Vec<_> = more
            .iter()
            .zip(&ranges)
            .map(|((sequence, _), range)| (*sequence, &input[range.clone()]))
            .collect();
        let logits = decoder.step(&pairs, group).unwrap();
        assert_eq!(logits.shape(), [pairs.len(), expected.vocabulary]);
        let values = logits.values().unwrap();
        for (range, row) in ranges.iter().zip(values.chunks_exact(expected.vocabulary)) {
            seen.push((range.end - 1, row.to_vec()));
        }
    };
    step(&mut decoder, &[(2, 3)]);
    step(&mut decoder, &[(2, 1), (0, 1)]);
    step(&mut decoder, &[(1, 4), (2, 1), (3, 2), (0, 1)]);
    step(&mut decoder, &[(3, 1), (1, 2)]);
    // A prefix that two sequences share, over one that another had.
    decoder.fork(1, 3, 5).unwrap();
    decoder.truncate(2, 2);
    assert_eq!([0, 1, 2, 3].map(|sequence| decoder.len(sequence)), [2, 6, 2, 5]);
    step(&mut decoder, &[(3, 2), (0, 1), (2, 2), (1, 1)]);
    for _ in 0..3 {
        step(&mut decoder, &[(3, 1), (0, 1), (2, 1), (1, 1)]);
    }
    let left = input.len() - decoder.len(0);
    step(&mut decoder, &[(1, 1), (0, left)]);
    decoder.fork(0, 1, input.len() - 1).unwrap();
    step(&mut decoder, &[(1, 1)]);
    seen
}

/// Continues prompts by `steps` tokens each in greedy passes, most of which start before the tokens of the one before are known. Prompts
/// enter one after the other, the order of the sequences changes, and now and then some get their token from the host.
///
/// # Panics
/// When the model fails.
pub fn greedy(
    model: &Arc<Llama>,
    prompts: &[Vec<u32>],
    steps: usize,
    passes: Passes,
    group: &mut ProcessGroup,
) -> Vec<Vec<u32>> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let mut decoder = model.decoder(CacheSize::full(prompts.len(), longest + steps), passes).unwrap();
    let (mut made, mut started) = (vec![Vec::new(); prompts.len()], vec![0; prompts.len()]);
    let mut ahead: Option<(Vec<usize>, GreedyPass)> = None;
    for round in 0.. {
        let from_host = round % 4 == 3;
        if from_host {
            finish(ahead.take(), &mut made, group);
        }
        let running = |i: &usize| round >= 2 * i && started[*i] < steps;
        let mut sequences: Vec<usize> = (0..prompts.len()).filter(running).collect();
        let shift = round % sequences.len().max(1);
        sequences.rotate_left(shift);
        let pair = |i: &usize| match made[*i].last() {
            _ if started[*i] == 0 => (*i, NextTokens::Known(&prompts[*i][..])),
            Some(token) if from_host && i.is_multiple_of(2) => {
                (*i, NextTokens::Known(slice::from_ref(token)))
            }
            _ => (*i, NextTokens::Chosen),
        };
        let pairs: Vec<_> = sequences.iter().map(pair).collect();
        let pass = (!pairs.is_empty()).then(|| decoder.start_greedy(&pairs, group).unwrap());
        for i in &sequences {
            started[*i] += 1;
        }
        let before = std::mem::replace(&mut ahead, pass.map(|pass| (sequences, pass)));
        let is_over = before.is_none() && ahead.is_none() && started.iter().all(|n| *n == steps);
        finish(before, &mut made, group);
        if is_over {
            break;
        }
    }
    made
}

/// Waits for the tokens of a pass of these sequences, if there is one.
fn finish(pass: Option<(Vec<usize>, GreedyPass)>, made: &mut [Vec<u32>], group: &mut ProcessGroup) {
    let Some((sequences, pass)) = pass else { return };
    for (sequence, token) in sequences.into_iter().zip(pass.wait(group).unwrap()) {
        made[sequence].push(token.unwrap());
    }
}
