//! Rotary position embedding: pairs of elements of a head are rotated by an angle that grows with the position.

use std::f64::consts::TAU;

/// The scaling of a model's frequencies for contexts longer than it was first trained on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RotaryScaling {
    /// No scaling.
    None,
    /// All frequencies are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
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

/// The rotary frequencies of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct Rotary {
    frequencies: Vec<f32>,
}

impl Rotary {
    /// Computes the frequencies for heads of `head_dim` elements: `theta^(-2i / head_dim)`, scaled.
    pub fn new(head_dim: usize, theta: f64, scaling: RotaryScaling) -> Self {
        let frequency = |i: usize| theta.powf(-2.0 * i as f64 / head_dim as f64);
        Self { frequencies: (0..head_dim / 2).map(|i| scale(frequency(i), scaling) as f32).collect() }
    }

    /// Returns the angle of each pair of elements between one position and the next.
    pub(crate) fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// Computes the rotations of several positions.
    pub fn table(&self, positions: impl IntoIterator<Item = usize>) -> RotaryTable {
        let half = self.frequencies.len();
        let mut table = RotaryTable { half, count: 0, sin_cos: Vec::new() };
        for at in positions {
            table.count += 1;
            for frequency in &self.frequencies {
                // The angle is rounded to f32, as the models' training code does; its sine is then exact.
                let (sin, cos) = f64::from(at as f32 * frequency).sin_cos();
                table.sin_cos.push((sin as f32, cos as f32));
            }
        }
        table
    }
}

fn scale(frequency: f64, scaling: RotaryScaling) -> f64 {
    match scaling {
        RotaryScaling::None => frequency,
        RotaryScaling::Linear { factor } => frequency / factor,
        RotaryScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_positions } => {
            let turns = original_positions * frequency / TAU;
            if turns < low_frequency_factor {
                frequency / factor
            } else if turns > high_frequency_factor {
                frequency
            } else {
                let kept = (turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
        }
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
        let rotary = Rotary::new(8, 10_000.0, RotaryScaling::None);
        let table = rotary.table(0..3);
        let head = [1.0, -2.0, 3.0, 0.5, 4.0, 1.5, -1.0, 2.0];
        let mut rotated = head;
        table.rotate(0, &mut rotated);
        assert_eq!(rotated, head);
        table.rotate(2, &mut rotated);
        let square = |x: &[f32]| x.iter().map(|v| v * v).sum::<f32>();
        assert!(rotated != head && (square(&rotated) - square(&head)).abs() < 1e-4);
    }

    #[test]
    fn llama3_scaling_keeps_high_divides_low_and_blends_between() {
        let scaling = RotaryScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_positions: 128.0,
        };
        assert_eq!(scale(1.0, scaling), 1.0);
        assert_eq!(scale(0.001, scaling), 0.001 / 8.0);
        let middle = TAU * 2.5 / 128.0;
        let blended = scale(middle, scaling);
        assert!((blended - (0.5 * middle / 8.0 + 0.5 * middle)).abs() < 1e-12);
        assert_eq!(scale(0.5, RotaryScaling::Linear { factor: 4.0 }), 0.125);
    }
}
