//! Random weights for checks and measurements without a checkpoint.

use std::ops::Range;

use super::source::{TensorSlice, WeightSource};
use crate::digest::digest;
use crate::error::Result;
use crate::float::{Float, with_float};
use crate::tensor::Tensor;

/// A source of reproducible random weights.
///
/// An element depends on the name of its tensor and its index in the whole tensor, so the shards belong to the same model,
/// whatever the number of ranks. Matrices are scaled such that activations stay near 1. Vectors are near 1, like the weights of
/// norms.
#[derive(Clone, Copy, Debug)]
pub struct NoiseSource;

/// The elements of a slice, and the distribution of their values.
#[derive(Clone)]
struct Noise {
    seed: u64,
    /// The first row of the slice.
    first: usize,
    columns: Range<usize>,
    scale: f32,
    middle: f32,
}

impl WeightSource for NoiseSource {
    fn fill(&mut self, tensor: &TensorSlice<'_>, target: &mut Tensor, at: usize) -> Result<()> {
        tensor.check(target, at)?;
        let TensorSlice { rows, columns, .. } = tensor.clone();
        if columns.is_empty() {
            return Ok(());
        }
        let inputs = tensor.shape.get(1).copied();
        let noise = Noise {
            seed: digest(tensor.name.bytes()),
            first: rows.start,
            columns,
            // Uniform values between -a and a have the variance a² / 3.
            scale: inputs.map_or(0.1, |inputs| (3.0 / inputs as f32).sqrt()),
            middle: if inputs.is_some() { 0.0 } else { 1.0 },
        };
        let fill = with_float!(target.dtype(), T => fill_rows::<T> as FillRows)?;
        target.fill_rows(at, rows.len(), &|rows, to| fill(&noise, rows, to))
    }
}

type FillRows = fn(&Noise, Range<usize>, &mut [u8]);

fn fill_rows<T: Float>(noise: &Noise, rows: Range<usize>, to: &mut [u8]) {
    let Noise { seed, first, columns, scale, middle } = noise.clone();
    let to = bytemuck::cast_slice_mut::<u8, T>(to);
    for (row, to) in rows.zip(to.chunks_exact_mut(columns.len())) {
        let of_row = mix(seed ^ (first + row) as u64);
        for (column, to) in columns.clone().zip(to) {
            let bits = mix(of_row.wrapping_add(column as u64)) >> 40;
            *to = T::narrow((bits as f32 / (1u64 << 23) as f32 - 1.0) * scale + middle);
        }
    }
}

/// Mixes a number to 64 bits, with the last steps of SplitMix64.
fn mix(number: u64) -> u64 {
    let mixed = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB)
}

#[cfg(test)]
mod tests {
    use ryzanstein_process_group::DType;

    use super::*;

    fn values(slice: &TensorSlice<'_>) -> Vec<f32> {
        let mut target = Tensor::zeros(&[slice.rows.len(), slice.columns.len()], DType::F32).unwrap();
        NoiseSource.fill(slice, &mut target, 0).unwrap();
        target.values().unwrap().into_owned()
    }

    #[test]
    fn shards_are_slices_of_one_matrix() {
        let tensor = TensorSlice::whole("w", &[6, 8]);
        let whole = values(&tensor);
        assert_eq!(values(&TensorSlice { rows: 2..6, ..tensor.clone() }), whole[16..]);
        let right: Vec<f32> = whole.chunks(8).flat_map(|row| row[5..].to_vec()).collect();
        assert_eq!(values(&TensorSlice { columns: 5..8, ..tensor }), right);
    }

    #[test]
    fn matrices_keep_activations_near_one_and_vectors_are_near_one() {
        let matrix = values(&TensorSlice::whole("w", &[100, 400]));
        let variance = matrix.iter().map(|x| x * x).sum::<f32>() / matrix.len() as f32;
        assert!((variance * 400.0 - 1.0).abs() < 0.05, "{variance}");
        let vector = values(&TensorSlice::whole("w", &[400]));
        assert!(vector.iter().all(|x| (0.9..=1.1).contains(x)), "{vector:?}");
        assert!(vector.windows(2).any(|pair| pair[0] != pair[1]));
    }
}
