//! Sampling of tokens from logits. Pure: the same logits and seed give the same token on every rank and machine. So the random
//! number generator and the exponential function are our own, not those of the system's library.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use crate::argmax::most_likely;
use crate::compute::exp;
use crate::error::{ConfigurationError, Result};

/// The number of tokens that are sorted first.
const FIRST_SORTED: usize = 64;

/// The sampling method.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Sampling {
    /// The most likely token; the lowest one of a tie.
    Greedy,
    /// A random token, by its probability.
    Random {
        /// The divisor of the logits: below 1, likely tokens become more likely.
        temperature: f64,
        /// Sample from the most likely tokens that together have this probability.
        top_p: f64,
        /// Sample from the K most likely tokens only; `None` means all.
        top_k: Option<NonZeroUsize>,
        /// The seed of the random numbers.
        seed: u64,
    },
}

/// Penalties that make tokens that have occurred less likely, or more likely. The default changes nothing.
///
/// They apply in this order, as in vLLM; presence and frequency are those of the OpenAI API.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Penalties {
    /// Divisor of the positive logits, and factor of the others, for tokens in the prompt and new ones. Above 0; 1 for none.
    pub repetition: f32,
    /// Subtracted from the logits of tokens generated so far. From -2 to 2; 0 for none.
    pub presence: f32,
    /// Subtracted from the logits of tokens generated so far, once for each occurrence. From -2 to 2; 0 for none.
    pub frequency: f32,
}

impl Default for Penalties {
    fn default() -> Self {
        Self { repetition: 1.0, presence: 0.0, frequency: 0.0 }
    }
}

impl Penalties {
    /// Returns the penalties if they are in range.
    ///
    /// # Errors
    /// Returns an error that names the penalty that is out of range.
    pub fn check(self) -> Result<Self> {
        if !(self.repetition > 0.0 && self.repetition.is_finite()) {
            return Err(ConfigurationError::RepetitionPenalty(self.repetition).into());
        }
        for (name, value) in [("presence", self.presence), ("frequency", self.frequency)] {
            if !(-2.0..=2.0).contains(&value) {
                return Err(ConfigurationError::Penalty { name, value }.into());
            }
        }
        Ok(self)
    }
}

/// Samples the tokens of one sequence, one after the other.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
    penalties: Penalties,
    /// Number of times that each token has been generated; 0 for those of the prompt only. Empty without penalties.
    chosen: BTreeMap<u32, u32>,
}

impl Sampler {
    /// Creates a sampler, seeded by `sampling`.
    ///
    /// # Errors
    /// Returns an error if the temperature is not positive, or if `top_p` is not above 0 and at most 1.
    pub fn new(sampling: Sampling) -> Result<Self> {
        let mut state = 0;
        if let Sampling::Random { temperature, top_p, seed, .. } = sampling {
            if !(temperature > 0.0 && temperature.is_finite()) {
                return Err(ConfigurationError::Temperature(temperature).into());
            }
            if !(top_p > 0.0 && top_p <= 1.0) {
                return Err(ConfigurationError::TopP(top_p).into());
            }
            state = seed;
        }
        Ok(Self { sampling, state, penalties: Penalties::default(), chosen: BTreeMap::new() })
    }

    /// Adds penalties for the tokens of `prompt`, and for those that are generated from now on.
    ///
    /// # Errors
    /// Returns an error if a penalty is out of its range.
    pub fn with_penalties(mut self, penalties: Penalties, prompt: &[u32]) -> Result<Self> {
        self.penalties = penalties.check()?;
        if penalties != Penalties::default() {
            self.chosen = prompt.iter().map(|token| (*token, 0)).collect();
        }
        Ok(self)
    }

    /// Returns true if it takes the most likely token, whatever came before.
    pub fn is_greedy(&self) -> bool {
        self.sampling == Sampling::Greedy && self.penalties == Penalties::default()
    }

    /// Samples the next token.
    ///
    /// # Errors
    /// Returns an error if a logit is NaN, or the greatest is infinite: values have overflowed, or the weights are damaged.
    pub fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        let token = self.choose_from(&self.penalised(logits))?;
        if self.penalties != Penalties::default() {
            *self.chosen.entry(token).or_default() += 1;
        }
        Ok(token)
    }

    /// Returns the logits after the penalties.
    fn penalised<'a>(&self, logits: &'a [f32]) -> Cow<'a, [f32]> {
        let Penalties { repetition, presence, frequency } = self.penalties;
        let mut logits = Cow::Borrowed(logits);
        if self.penalties == Penalties::default() {
            return logits;
        }
        for (token, times) in &self.chosen {
            let Some(logit) = logits.to_mut().get_mut(*token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            if *times > 0 {
                *logit -= *times as f32 * frequency + presence;
            }
        }
        logits
    }

    fn choose_from(&mut self, logits: &[f32]) -> Result<u32> {
        let (token, greatest) = most_likely(logits)?;
        match self.sampling {
            Sampling::Greedy => Ok(token),
            Sampling::Random { temperature, top_p, top_k, .. } => {
                let random = self.next();
                let most = top_k.map_or(usize::MAX, NonZeroUsize::get);
                Ok(sample(logits, greatest, temperature, (top_p, most), random))
            }
        }
    }

    /// Returns a number in `[0, 1)` (SplitMix64).
    fn next(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Samples a token; `random` is in `[0, 1)`. It sorts only the tokens that `top_p` and `top_k` need, which usually are few.
fn sample(logits: &[f32], greatest: f32, temperature: f64, (top_p, top_k): (f64, usize), random: f64) -> u32 {
    let weigh = |logit: &f32| {
        let scaled = (f64::from(logit - greatest) / temperature) as f32;
        // A logit of negative infinity has weight 0.
        if scaled > -87.0 { exp(scaled) } else { 0.0 }
    };
    let weights: Vec<f32> = logits.iter().map(weigh).collect();
    let weight = |(_, token): &(f32, u32)| f64::from(weights[*token as usize]);
    let sum = |tokens: &[(f32, u32)]| tokens.iter().map(weight).sum::<f64>();
    let mut tokens: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
    let (mut sorted, mut kept, mut count) = (0, 0.0, 0);
    let takes_all = top_p >= 1.0 && top_k >= tokens.len();
    if top_k < tokens.len() {
        sort_first(&mut tokens, 0, top_k);
        tokens.truncate(top_k);
        sorted = top_k;
    }
    let total = sum(&tokens);
    if takes_all {
        (kept, count) = (total, tokens.len());
    }
    while count < tokens.len() && (count == 0 || kept < top_p * total) {
        if count == sorted {
            sorted = (16 * sorted).max(FIRST_SORTED).min(tokens.len());
            sort_first(&mut tokens, count, sorted);
        }
        kept += weight(&tokens[count]);
        count += 1;
    }
    // Rounding may leave a little after the last token that is possible.
    let (mut left, mut chosen) = (random * kept, tokens[0].1);
    for token in &tokens[..count] {
        let weight = weight(token);
        if weight > 0.0 {
            (left, chosen) = (left - weight, token.1);
        }
        if left < 0.0 {
            break;
        }
    }
    chosen
}

/// Sorts the first `end` tokens, the most likely one first and ties by token, so that the order is the same everywhere. Those before
/// `begin` are in their places.
fn sort_first(tokens: &mut [(f32, u32)], begin: usize, end: usize) {
    let order =
        |a: &(f32, u32), b: &(f32, u32)| b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1));
    if end < tokens.len() {
        tokens[begin..].select_nth_unstable_by(end - begin, order);
    }
    tokens[begin..end].sort_unstable_by(order);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn random(temperature: f64, top_p: f64, seed: u64) -> Sampler {
        Sampler::new(Sampling::Random { temperature, top_p, top_k: None, seed }).unwrap()
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let mut sampler = Sampler::new(Sampling::Greedy).unwrap();
        assert_eq!(sampler.choose(&[0.5, 2.0, -1.0, 2.0]).unwrap(), 1);
        assert!(sampler.choose(&[0.5, f32::NAN]).is_err());
        assert!(sampler.choose(&[]).is_err());
    }

    #[test]
    fn logits_that_give_no_probabilities_are_refused() {
        for mut sampler in [Sampler::new(Sampling::Greedy).unwrap(), random(1.0, 1.0, 42)] {
            for logits in [[0.5, f32::INFINITY], [f32::NEG_INFINITY; 2], [f32::NAN, 1.0]] {
                let error = sampler.choose(&logits).unwrap_err().to_string();
                assert!(error.contains("logit") && error.contains("token"), "{logits:?}: {error}");
            }
            // A token with a logit of negative infinity is valid.
            assert_eq!(sampler.choose(&[f32::NEG_INFINITY, 1.0]).unwrap(), 1);
        }
    }

    #[test]
    fn one_seed_gives_one_sequence_and_another_seed_another() {
        let logits: Vec<f32> = (0..50u8).map(|i| f32::from(i % 7)).collect();
        let run = |seed| {
            let mut sampler = random(1.0, 0.9, seed);
            (0..40).map(|_| sampler.choose(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn tokens_come_as_often_as_their_probability_says() {
        let logits = [0.0, 3f32.ln(), f32::NEG_INFINITY];
        let mut sampler = random(1.0, 1.0, 42);
        let ones = (0..10_000).filter(|_| sampler.choose(&logits).unwrap() == 1).count();
        assert!((7_300..7_700).contains(&ones), "seed 42: {ones} of 10000, expected about 7500");
    }

    #[test]
    fn top_p_leaves_unlikely_tokens_out() {
        let logits = [0.0, 3f32.ln()];
        let mut sampler = random(1.0, 0.7, 1);
        assert!((0..1_000).all(|_| sampler.choose(&logits).unwrap() == 1));
    }

    #[test]
    fn top_k_leaves_all_but_the_likeliest_out() {
        let logits = [1.0, 3.0, 2.0, 2.0];
        let chosen = |k| {
            let top_k = NonZeroUsize::new(k);
            let mut sampler =
                Sampler::new(Sampling::Random { temperature: 1.0, top_p: 1.0, top_k, seed: 3 }).unwrap();
            (0..200).map(|_| sampler.choose(&logits).unwrap()).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(chosen(1), [1].into());
        assert_eq!(chosen(2), [1, 2].into());
        assert_eq!(chosen(0), [0, 1, 2, 3].into());
    }

    /// The definition: all tokens sorted.
    fn slow(logits: &[f32], temperature: f64, (top_p, top_k): (f64, usize), random: f64) -> u32 {
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| {
            let scaled = (f64::from(logit - greatest) / temperature) as f32;
            if scaled > -87.0 { f64::from(exp(scaled)) } else { 0.0 }
        };
        let mut tokens: Vec<(f64, u32)> = logits.iter().zip(0..).map(|(l, t)| (weight(*l), t)).collect();
        if top_p < 1.0 || top_k < tokens.len() {
            let all: f64 = tokens.iter().map(|t| t.0).sum();
            tokens.sort_by(|a, b| logits[b.1 as usize].partial_cmp(&logits[a.1 as usize]).unwrap());
            let is_cut = top_k < tokens.len();
            tokens.truncate(top_k);
            let total = if is_cut { tokens.iter().map(|t| t.0).sum() } else { all };
            let mut kept = 0.0;
            tokens.retain(|token| {
                let keeps = kept == 0.0 || kept < top_p * total;
                kept += if keeps { token.0 } else { 0.0 };
                keeps
            });
        }
        let mut left = random * tokens.iter().map(|t| t.0).sum::<f64>();
        let found = tokens.iter().find(|token| {
            left -= token.0;
            left < 0.0
        });
        found.or(tokens.last()).unwrap().1
    }

    proptest! {
        #[test]
        fn the_token_is_that_of_all_tokens_sorted(
            logits in prop::collection::vec(
                prop_oneof![9 => (-40i16..40).prop_map(|l| f32::from(l) / 4.0), 1 => Just(f32::NEG_INFINITY)],
                1..2000,
            ),
            temperature in 0.1..3.0f64,
            top_p in prop_oneof![Just(1.0), 0.01..1.0f64],
            top_k in prop_oneof![Just(usize::MAX), 1usize..300],
            random in 0.0..1.0f64,
        ) {
            prop_assume!(logits.iter().any(|logit| logit.is_finite()));
            let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let got = sample(&logits, greatest, temperature, (top_p, top_k), random);
            prop_assert_eq!(got, slow(&logits, temperature, (top_p, top_k), random));
            prop_assert!(logits[got as usize].is_finite());
        }
    }

    fn penalised(penalties: Penalties, prompt: &[u32], chosen: &[u32], logits: &[f32]) -> Vec<f32> {
        let mut sampler = Sampler::new(Sampling::Greedy).unwrap().with_penalties(penalties, prompt).unwrap();
        for token in chosen {
            let mut forced = vec![0.0; logits.len()];
            forced[*token as usize] = 1e9;
            assert_eq!(sampler.choose(&forced).unwrap(), *token);
        }
        sampler.penalised(logits).into_owned()
    }

    #[test]
    fn each_penalty_changes_the_logits_as_its_definition_says() {
        let logits = [2.0, -2.0, 1.0, 0.0, 3.0];
        let none = Penalties::default();
        let of = |penalties| penalised(penalties, &[0, 1, 0], &[2, 4, 4], &logits);
        assert_eq!(of(none), logits);
        // Tokens of the prompt and new ones, once each: positive logits are divided, others multiplied.
        assert_eq!(of(Penalties { repetition: 2.0, ..none }), [1.0, -4.0, 0.5, 0.0, 1.5]);
        assert_eq!(of(Penalties { repetition: 0.5, ..none }), [4.0, -1.0, 2.0, 0.0, 6.0]);
        // New tokens only.
        assert_eq!(of(Penalties { presence: 0.5, ..none }), [2.0, -2.0, 0.5, 0.0, 2.5]);
        assert_eq!(of(Penalties { frequency: 0.5, ..none }), [2.0, -2.0, 0.5, 0.0, 2.0]);
        assert_eq!(of(Penalties { frequency: -0.5, ..none }), [2.0, -2.0, 1.5, 0.0, 4.0]);
        let all = Penalties { repetition: 2.0, presence: 0.25, frequency: 0.5 };
        assert_eq!(of(all), [1.0, -4.0, -0.25, 0.0, 0.25]);
    }

    #[test]
    fn a_token_that_was_chosen_gives_way_to_the_next_likeliest() {
        let penalties = Penalties { presence: 1.0, ..Penalties::default() };
        let mut sampler = Sampler::new(Sampling::Greedy).unwrap().with_penalties(penalties, &[2]).unwrap();
        let chosen: Vec<_> = (0..4).map(|_| sampler.choose(&[1.0, 1.5, 1.75]).unwrap()).collect();
        assert_eq!(chosen, [2, 1, 0, 2]);
    }

    #[test]
    fn penalties_out_of_range_are_refused_and_tokens_that_have_no_logit_are_passed_over() {
        let none = Penalties::default();
        for penalties in [
            Penalties { repetition: 0.0, ..none },
            Penalties { repetition: f32::NAN, ..none },
            Penalties { presence: 2.1, ..none },
            Penalties { frequency: f32::NAN, ..none },
        ] {
            let error = Sampler::new(Sampling::Greedy).unwrap().with_penalties(penalties, &[]).unwrap_err();
            assert!(error.to_string().contains("penalty"), "{error}");
        }
        let without = Sampler::new(Sampling::Greedy).unwrap().with_penalties(none, &[7]).unwrap();
        assert!(without.chosen.is_empty());
        assert_eq!(penalised(Penalties { repetition: 2.0, ..none }, &[7], &[], &[1.0, 2.0]), [1.0, 2.0]);
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for (temperature, top_p) in [(0.0, 1.0), (-1.0, 1.0), (f64::NAN, 1.0), (1.0, 0.0), (1.0, 1.1)] {
            assert!(Sampler::new(Sampling::Random { temperature, top_p, top_k: None, seed: 0 }).is_err());
        }
    }
}
