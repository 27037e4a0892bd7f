//! Sequences that are decoded together.

use std::sync::Arc;

use ryzanstein_process_group::ProcessGroup;
use ryzanstein_tensor_parallel::{Llama, Passes};

use crate::fixtures::Expected;

/// How many at once.
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
    let mut decoder = model.decoder(SEQUENCES, input.len(), passes).unwrap();
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
