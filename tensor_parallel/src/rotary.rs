//! Rotary position embedding: pairs of elements of a head are rotated by an angle that grows with the position.

use std::borrow::Cow;
use std::f32::consts::PI;
use std::f64::consts::TAU;

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
    /// Computes the frequencies for heads of `head_dim` elements: `theta^(-2i / head_dim)`.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        Self::of_powers(head_dim, theta, |_, power| 1.0 / power)
    }

    /// Computes frequencies that are all divided by a factor.
    pub fn linear(head_dim: usize, theta: f64, factor: f64) -> Self {
        Self::of_powers(head_dim, theta, |_, power| 1.0 / power / factor as f32)
    }

    /// Computes frequencies whose base grows with the length of the sequence, once that is greater than `original`, the context
    /// length that the model was trained on. `factor` is the growth of the length for which the base is chosen.
    pub fn dynamic(head_dim: usize, theta: f64, factor: f64, original: f64) -> Self {
        Self { longer: Longer::Dynamic { original, factor, theta }, ..Self::new(head_dim, theta) }
    }

    /// Computes frequencies as in `YaRN`: high ones are unchanged, low ones are divided by the factor, with a ramp between those
    /// with `[fast, slow]` turns in `original` positions. With `truncate`, the ramp begins and ends at whole indices.
    pub fn yarn(
        head_dim: usize,
        theta: f64,
        factor: f64,
        original: f64,
        [fast, slow]: [f64; 2],
        truncate: bool,
    ) -> Self {
        // The index of the frequency with this number of turns.
        let index = |turns: f64| head_dim as f64 * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (low, high) = (index(fast), index(slow));
        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
        // A ramp of no length would be a division by zero.
        let length = if low == high { 0.001 } else { high - low };
        Self::of_powers(head_dim, theta, |i, power| {
            let kept = 1.0 - ((i as f32 - low as f32) / length as f32).clamp(0.0, 1.0);
            1.0 / (factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
        })
    }

    /// Computes frequencies as in `LongRoPE`: each is divided by a factor of its own, one of `short` for sequences of up to
    /// `original` positions, and one of `long` for longer ones.
    ///
    /// # Panics
    /// Panics if a list has fewer than `head_dim / 2` factors.
    pub fn longrope(head_dim: usize, theta: f64, original: f64, short: &[f32], long: &[f32]) -> Self {
        let divided = |by: &[f32]| Self::of_powers(head_dim, theta, |i, power| 1.0 / (by[i] * power));
        let longer = Longer::Fixed { original, frequencies: divided(long).frequencies };
        Self { longer, ..divided(short) }
    }

    /// Computes frequencies as in Llama 3.1: low ones, with wavelengths longer than `original / low`, are divided by the factor,
    /// high ones, with wavelengths shorter than `original / high`, are unchanged, and those between are interpolated.
    pub fn llama3(head_dim: usize, theta: f64, factor: f64, original: f64, [low, high]: [f64; 2]) -> Self {
        let parameters = [factor, low, high, original].map(|parameter| parameter as f32);
        Self::of_powers(head_dim, theta, |_, power| llama3(1.0 / power, parameters))
    }

    /// Multiplies all sines and cosines by a factor.
    #[must_use]
    pub fn amplified(self, amplitude: f64) -> Self {
        Self { amplitude: amplitude as f32, ..self }
    }

    fn of_powers(head_dim: usize, theta: f64, frequency: impl Fn(usize, f32) -> f32) -> Self {
        let powers = powers(head_dim, theta as f32).into_iter().enumerate();
        let frequencies = powers.map(|(i, power)| frequency(i, power)).collect();
        Self { frequencies, longer: Longer::Same, amplitude: 1.0 }
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
        let mut table = RotaryTable { half: self.half(), sin_cos: Vec::new() };
        let (mut of_length, mut frequencies) = (1, self.frequencies(1));
        for (at, length) in rows {
            if length != of_length && self.depends_on_length() {
                (of_length, frequencies) = (length, self.frequencies(length));
            }
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
    sin_cos: Vec<(f32, f32)>,
}

impl RotaryTable {
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
        let rotary = Rotary::new(8, THETA);
        let table = rotary.table((0..3).map(|at| (at, 3)));
        let head = [1.0, -2.0, 3.0, 0.5, 4.0, 1.5, -1.0, 2.0];
        let mut rotated = head;
        table.rotate(0, &mut rotated);
        assert_eq!(rotated, head);
        table.rotate(2, &mut rotated);
        let square = |x: &[f32]| x.iter().map(|v| v * v).sum::<f32>();
        assert!(rotated != head && (square(&rotated) - square(&head)).abs() < 1e-4);
    }

    const THETA: f64 = 10_000.0;

    fn assert_near(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        let near = |(got, want): (&f32, &f32)| (got - want).abs() <= 2e-7 * want;
        assert!(got.iter().zip(want).all(near), "{got:?} and should be {want:?}");
    }

    // Every expectation is that of `modeling_rope_utils.py` in transformers 5.24.

    #[test]
    fn llama3_scaling_keeps_high_divides_low_and_blends_between() {
        let llama3 = Rotary::llama3(8, THETA, 8.0, 1024.0, [1.0, 4.0]);
        assert_near(&llama3.frequencies, &[1.0, 0.1, 0.003_086_760_6, 0.000_125]);
        assert_near(&Rotary::linear(8, THETA, 4.0).frequencies, &[0.25, 0.025, 0.0025, 0.00025]);
    }

    #[test]
    fn yarn_scaling_has_a_ramp_and_an_amplitude() {
        let yarn = |truncate| Rotary::yarn(8, THETA, 4.0, 1024.0, [32.0, 1.0], truncate).amplified(1.5);
        assert_near(&yarn(true).frequencies, &[1.0, 0.074_999_996, 0.005, 0.000_25]);
        assert_near(&yarn(false).frequencies, &[1.0, 0.085_398_64, 0.003_556_971_4, 0.000_25]);
        let table = yarn(true).table([(0, 1)]);
        let mut head = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0];
        table.rotate(0, &mut head);
        assert_eq!(head, [1.5, 1.5, 1.5, 1.5, 3.0, 3.0, 3.0, 3.0]);
    }

    #[test]
    fn dynamic_and_longrope_scaling_depend_on_the_length_of_the_pass() {
        let dynamic = Rotary::dynamic(8, THETA, 2.0, 64.0);
        assert_near(&dynamic.frequencies(64), &Rotary::new(8, THETA).frequencies);
        assert_near(&dynamic.frequencies(65), &[1.0, 0.098_979_525, 0.009_796_946, 0.000_969_696_96]);
        assert_near(&dynamic.frequencies(128), &[1.0, 0.069_336_124, 0.004_807_498_3, 0.000_333_333_33]);
        let rotary = Rotary::longrope(8, THETA, 64.0, &[1.0, 1.25, 1.5, 2.0], &[1.5, 2.0, 4.0, 8.0]);
        assert_near(&rotary.frequencies(64), &[1.0, 0.08, 1.0 / 150.0, 0.0005]);
        assert_near(&rotary.frequencies(65), &[1.0 / 1.5, 0.05, 0.0025, 0.000_125]);
        // Rows of one table may belong to sequences of different lengths.
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
