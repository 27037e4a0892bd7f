//! Rotary position embedding: pairs of elements of a head are rotated by an angle that grows with the position.

use std::borrow::Cow;
use std::f32::consts::PI;
use std::f64::consts::TAU;

/// The scaling of a model's frequencies for contexts longer than it was first trained on.
#[derive(Clone, PartialEq, Debug)]
pub enum RotaryScaling {
    /// No scaling.
    None,
    /// All frequencies are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// The base of the frequencies grows with the length of the sequence, once that is greater than `original_positions`.
    Dynamic {
        /// The growth of the context length for which the base is chosen.
        factor: f64,
        /// The context length that the model was trained on.
        original_positions: f64,
    },
    /// Scaling as in `YaRN`: high frequencies are unchanged, low ones are divided by the factor, with a ramp between them.
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// The ramp begins at the frequency with this number of turns in `original_positions`.
        beta_fast: f64,
        /// The ramp ends at the frequency with this number of turns in `original_positions`.
        beta_slow: f64,
        /// True if the ramp begins and ends at whole indices of frequencies.
        truncate: bool,
        /// The factor of all sines and cosines.
        attention_factor: f64,
        /// The context length that the model was first trained on.
        original_positions: f64,
    },
    /// Scaling as in `LongRoPE`: each frequency is divided by a factor of its own, which depends on whether the sequence is longer
    /// than `original_positions`.
    LongRope {
        /// The growth of the context length.
        factor: f64,
        /// The divisors for sequences of up to `original_positions`.
        short: Vec<f32>,
        /// The divisors for longer sequences.
        long: Vec<f32>,
        /// The factor of all sines and cosines.
        attention_factor: f64,
        /// The context length that the model was first trained on.
        original_positions: f64,
    },
    /// Scaling as in Llama 3.1: high frequencies are unchanged, low ones are divided by the factor, those between are
    /// interpolated.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Frequencies with wavelengths longer than `original_positions` divided by this are low.
        low_frequency_factor: f64,
        /// Frequencies with wavelengths shorter than `original_positions` divided by this are high.
        high_frequency_factor: f64,
        /// The context length that the model was first trained on.
        original_positions: f64,
    },
}

/// The rotary frequencies of a model, rounded as those of transformers are: an angle is a frequency times a position, so its error
/// is that of the frequency times the position.
#[derive(Clone, PartialEq, Debug)]
pub struct Rotary {
    frequencies: Vec<f32>,
    longer: Longer,
    /// The factor of all sines and cosines.
    amplitude: f32,
}

/// The frequencies of longer sequences.
#[derive(Clone, PartialEq, Debug)]
enum Longer {
    Same,
    /// Other frequencies for more positions than the original ones.
    Fixed {
        original: f64,
        frequencies: Vec<f32>,
    },
    /// Frequencies of a base that grows with the length.
    Dynamic {
        original: f64,
        factor: f64,
        theta: f64,
    },
}

impl Rotary {
    /// Computes the frequencies for heads of `head_dim` elements: `theta^(-2i / head_dim)`, scaled.
    ///
    /// # Panics
    /// Panics if a list of [`RotaryScaling::LongRope`] has fewer than `head_dim / 2` divisors.
    pub fn new(head_dim: usize, theta: f64, scaling: &RotaryScaling) -> Self {
        let powers = powers(head_dim, theta as f32);
        let each = |frequency: &dyn Fn(usize, f32) -> f32| -> Vec<f32> {
            powers.iter().enumerate().map(|(i, power)| frequency(i, *power)).collect()
        };
        let (frequencies, longer, amplitude) = match *scaling {
            RotaryScaling::None => (each(&|_, power| 1.0 / power), Longer::Same, 1.0),
            RotaryScaling::Linear { factor } => {
                (each(&|_, power| 1.0 / power / factor as f32), Longer::Same, 1.0)
            }
            RotaryScaling::Dynamic { factor, original_positions: original } => {
                (each(&|_, power| 1.0 / power), Longer::Dynamic { original, factor, theta }, 1.0)
            }
            RotaryScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor,
                original_positions: original,
            } => {
                // The index of the frequency with this number of turns.
                let index =
                    |turns: f64| head_dim as f64 * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
                let (low, high) = (index(beta_fast), index(beta_slow));
                let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                // A ramp of no length would be a division by zero.
                let length = if low == high { 0.001 } else { high - low };
                let frequency = |i: usize, power: f32| {
                    let kept = 1.0 - ((i as f32 - low as f32) / length as f32).clamp(0.0, 1.0);
                    1.0 / (factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
                };
                (each(&frequency), Longer::Same, attention_factor)
            }
            RotaryScaling::LongRope {
                ref short,
                ref long,
                attention_factor,
                original_positions: original,
                ..
            } => {
                let divided = |by: &[f32]| each(&|i, power| 1.0 / (by[i] * power));
                let longer = Longer::Fixed { original, frequencies: divided(long) };
                (divided(short), longer, attention_factor)
            }
            RotaryScaling::Llama3 {
                factor,
                low_frequency_factor: low,
                high_frequency_factor: high,
                original_positions: original,
            } => {
                let parameters = [factor, low, high, original].map(|parameter| parameter as f32);
                (each(&|_, power| llama3(1.0 / power, parameters)), Longer::Same, 1.0)
            }
        };
        Self { frequencies, longer, amplitude: amplitude as f32 }
    }

    /// Returns the number of frequencies: half the length of a head.
    pub(crate) fn half(&self) -> usize {
        self.frequencies.len()
    }

    /// Returns the factor of all sines and cosines.
    pub(crate) fn amplitude(&self) -> f32 {
        self.amplitude
    }

    /// Returns true if the frequencies depend on the length of the sequence.
    pub(crate) fn depends_on_length(&self) -> bool {
        self.longer != Longer::Same
    }

    /// Returns the angle of each pair of elements between one position and the next, for tokens that make a sequence this long.
    pub(crate) fn frequencies(&self, length: usize) -> Cow<'_, [f32]> {
        let is_longer = |original: f64| length as f64 > original;
        match self.longer {
            Longer::Fixed { original, ref frequencies } if is_longer(original) => Cow::Borrowed(frequencies),
            Longer::Dynamic { original, factor, theta } if is_longer(original) => {
                let head_dim = 2 * self.half();
                let growth = factor as f32 * length as f32 / original as f32 - (factor - 1.0) as f32;
                let exponent = head_dim as f64 / (head_dim as f64 - 2.0);
                let powers = powers(head_dim, theta as f32 * growth.powf(exponent as f32));
                Cow::Owned(powers.into_iter().map(|power| 1.0 / power).collect())
            }
            _ => Cow::Borrowed(&self.frequencies),
        }
    }

    /// Returns true if all rotations of sequences of up to `length` positions are numbers.
    pub(crate) fn is_finite(&self, length: usize) -> bool {
        let of = |length| self.frequencies(length).iter().all(|frequency| frequency.is_finite());
        self.amplitude.is_finite() && of(1) && of(length)
    }

    /// Computes the rotations of several rows, each given as its position and the length of its sequence after the pass. As in
    /// transformers, scalings that depend on the length take that of the pass; keys of earlier passes keep their rotation.
    pub fn table(&self, rows: impl IntoIterator<Item = (usize, usize)>) -> RotaryTable {
        let mut table = RotaryTable { half: self.half(), count: 0, sin_cos: Vec::new() };
        let (mut of_length, mut frequencies) = (1, self.frequencies(1));
        for (at, length) in rows {
            if length != of_length && self.depends_on_length() {
                (of_length, frequencies) = (length, self.frequencies(length));
            }
            table.count += 1;
            for frequency in &*frequencies {
                // The angle is rounded to f32, as the models' training code does; its sine is then exact.
                let (sin, cos) = f64::from(at as f32 * frequency).sin_cos();
                table.sin_cos.push((sin as f32 * self.amplitude, cos as f32 * self.amplitude));
            }
        }
        table
    }
}

/// Returns the reciprocals of the frequencies, unscaled.
fn powers(head_dim: usize, theta: f32) -> Vec<f32> {
    (0..head_dim / 2).map(|i| theta.powf((2 * i) as f32 / head_dim as f32)).collect()
}

/// Returns a frequency scaled as in Llama 3.1.
fn llama3(frequency: f32, [factor, low, high, original]: [f32; 4]) -> f32 {
    let wavelength = 2.0 * PI / frequency;
    if wavelength > original / low {
        frequency / factor
    } else if wavelength < original / high {
        frequency
    } else {
        let kept = (original / wavelength - low) / (high - low);
        (1.0 - kept) * frequency / factor + kept * frequency
    }
}

/// The rotations of several positions, computed once for all layers.
#[derive(Clone, Debug)]
pub struct RotaryTable {
    half: usize,
    count: usize,
    sin_cos: Vec<(f32, f32)>,
}

impl RotaryTable {
    /// Returns the number of positions.
    pub fn positions(&self) -> usize {
        self.count
    }

    /// Rotates one head at the `index`th position: element `i` is paired with element `i + head_dim / 2`.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "an instruction set chosen at run time applies only to what is inlined"
    )]
    pub fn rotate(&self, index: usize, head: &mut [f32]) {
        let (first, second) = head.split_at_mut(self.half);
        let rotations = &self.sin_cos[index * self.half..(index + 1) * self.half];
        for ((a, b), (sin, cos)) in first.iter_mut().zip(second).zip(rotations) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_is_not_rotated_and_length_is_kept() {
        let rotary = Rotary::new(8, 10_000.0, &RotaryScaling::None);
        let table = rotary.table((0..3).map(|at| (at, 3)));
        let head = [1.0, -2.0, 3.0, 0.5, 4.0, 1.5, -1.0, 2.0];
        let mut rotated = head;
        table.rotate(0, &mut rotated);
        assert_eq!(rotated, head);
        table.rotate(2, &mut rotated);
        let square = |x: &[f32]| x.iter().map(|v| v * v).sum::<f32>();
        assert!(rotated != head && (square(&rotated) - square(&head)).abs() < 1e-4);
    }

    /// The frequencies of heads of 8 elements, for sequences of this length.
    fn of(scaling: &RotaryScaling, length: usize) -> Vec<f32> {
        Rotary::new(8, 10_000.0, scaling).frequencies(length).into_owned()
    }

    fn assert_near(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        let near = |(got, want): (&f32, &f32)| (got - want).abs() <= 2e-7 * want;
        assert!(got.iter().zip(want).all(near), "{got:?} and should be {want:?}");
    }

    // Every expectation is that of `modeling_rope_utils.py` in transformers 5.24.

    #[test]
    fn llama3_scaling_keeps_high_divides_low_and_blends_between() {
        let scaling = RotaryScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_positions: 1024.0,
        };
        assert_near(&of(&scaling, 1), &[1.0, 0.1, 0.003_086_760_6, 0.000_125]);
        assert_near(&of(&RotaryScaling::Linear { factor: 4.0 }, 1), &[0.25, 0.025, 0.0025, 0.00025]);
    }

    #[test]
    fn yarn_scaling_has_a_ramp_and_an_amplitude() {
        let yarn = |truncate| RotaryScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate,
            attention_factor: 1.5,
            original_positions: 1024.0,
        };
        assert_near(&of(&yarn(true), 1), &[1.0, 0.074_999_996, 0.005, 0.000_25]);
        assert_near(&of(&yarn(false), 1), &[1.0, 0.085_398_64, 0.003_556_971_4, 0.000_25]);
        let table = Rotary::new(8, 10_000.0, &yarn(true)).table([(0, 1)]);
        let mut head = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0];
        table.rotate(0, &mut head);
        assert_eq!(head, [1.5, 1.5, 1.5, 1.5, 3.0, 3.0, 3.0, 3.0]);
    }

    #[test]
    fn dynamic_and_longrope_scaling_depend_on_the_length_of_the_pass() {
        let dynamic = RotaryScaling::Dynamic { factor: 2.0, original_positions: 64.0 };
        assert_near(&of(&dynamic, 64), &of(&RotaryScaling::None, 1));
        assert_near(&of(&dynamic, 65), &[1.0, 0.098_979_525, 0.009_796_946, 0.000_969_696_96]);
        assert_near(&of(&dynamic, 128), &[1.0, 0.069_336_124, 0.004_807_498_3, 0.000_333_333_33]);
        let longrope = RotaryScaling::LongRope {
            factor: 4.0,
            short: vec![1.0, 1.25, 1.5, 2.0],
            long: vec![1.5, 2.0, 4.0, 8.0],
            attention_factor: 1.0,
            original_positions: 64.0,
        };
        assert_near(&of(&longrope, 64), &[1.0, 0.08, 1.0 / 150.0, 0.0005]);
        assert_near(&of(&longrope, 65), &[1.0 / 1.5, 0.05, 0.0025, 0.000_125]);
        // Rows of one table may belong to sequences of different lengths.
        let rotary = Rotary::new(8, 10_000.0, &longrope);
        let rotated = |rows: &[(usize, usize)], index| {
            let mut head = [1.0, -2.0, 3.0, 0.5, 4.0, 1.5, -1.0, 2.0];
            rotary.table(rows.iter().copied()).rotate(index, &mut head);
            head
        };
        assert_eq!(rotated(&[(3, 64), (3, 65), (3, 10)], 2), rotated(&[(3, 64)], 0));
        assert_eq!(rotated(&[(3, 64), (3, 65), (3, 10)], 1), rotated(&[(3, 65)], 0));
        assert_ne!(rotated(&[(3, 64)], 0), rotated(&[(3, 65)], 0));
    }
}
