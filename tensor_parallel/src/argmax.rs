//! The choice of the most likely token.

use std::ops::Range;

use ryzanstein_process_group::DType;

use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The values that are compared at a time.
const LANES: usize = 16;
/// The maximum number of columns: an `f32` holds their indices exactly.
const MOST_COLUMNS: usize = 1 << 24;

/// The reason of logits that are no finite numbers, and the remedy.
const OVERFLOW: &str = "values have overflowed, or the weights are damaged; in place of f16, which ends at 65504, compute in \
                        bf16 or f32 (--dtype, model.dtype); raise a repetition penalty near 0";

/// Returns the greatest value and its lowest index, or the first NaN if there is one. Nothing has negative infinity at 0.
pub(crate) fn argmax(values: &[f32]) -> (f32, usize) {
    let (mut lanes, mut has_nan) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
    for chunk in values.chunks(LANES) {
        for ((lane, has_nan), value) in lanes.iter_mut().zip(&mut has_nan).zip(chunk) {
            *lane = if value > lane { *value } else { *lane };
            *has_nan |= value.is_nan();
        }
    }
    if has_nan.contains(&true) {
        return (f32::NAN, values.iter().position(|value| value.is_nan()).unwrap_or(0));
    }
    let greatest = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    (greatest, values.iter().position(|value| *value == greatest).unwrap_or(0))
}

/// Returns the index of the greatest of some logits, the lowest one of a tie, with its logit.
///
/// # Errors
/// Returns an error if there are no logits, one is NaN, or the greatest is infinite: values have overflowed, or the weights are damaged.
pub(crate) fn most_likely(logits: &[f32]) -> Result<(u32, f32)> {
    if logits.is_empty() {
        return Err(Error::input("there are no logits to choose from"));
    }
    let (logit, token) = argmax(logits);
    check(logit, token)?;
    Ok((token as u32, logit))
}

fn check(logit: f32, token: usize) -> Result<()> {
    if logit.is_nan() {
        return Err(Error::input(format!("the logit of token {token} is not a number: {OVERFLOW}")));
    }
    if logit.is_infinite() {
        let what = format!("the greatest logit, that of token {token}, is {logit}: {OVERFLOW}");
        return Err(Error::input(what));
    }
    Ok(())
}

/// Checks the operands of [`Compute::argmax`](crate::Compute::argmax).
pub(crate) fn check_columns(x: &Tensor, columns: &Range<usize>) -> Result<()> {
    if x.shape().len() == 2
        && x.dtype() == DType::F32
        && columns.start <= columns.end
        && columns.len() <= x.columns()
        && columns.end <= MOST_COLUMNS
    {
        return Ok(());
    }
    Err(Error::input(format!(
        "logits {:?} of {} do not have the tokens {columns:?}, which may be at most {MOST_COLUMNS}",
        x.shape(),
        x.dtype()
    )))
}

/// Returns the candidates of each row `[rows, 2]` in host memory; see [`Compute::argmax`](crate::Compute::argmax).
pub(crate) fn candidates(x: &Tensor, columns: &Range<usize>) -> Result<Tensor> {
    check_columns(x, columns)?;
    let values = x.values()?;
    let of_row = |row: usize| {
        let from = row * x.columns();
        let (value, column) = argmax(&values[from..from + columns.len()]);
        [value, (columns.start + column) as f32]
    };
    Tensor::new(&[x.rows(), 2], (0..x.rows()).flat_map(of_row).collect(), DType::F32)
}

/// Returns the most likely token of a row of candidates, with its logit: pairs of a logit and its token, in ascending order of the tokens.
pub(crate) fn pick(row: &[f32]) -> (u32, f32) {
    let logits: Vec<f32> = row.iter().copied().step_by(2).collect();
    let (logit, at) = argmax(&logits);
    (row.get(2 * at + 1).map_or(0, |token| *token as u32), logit)
}

/// Returns the [most likely](pick) token of a row of candidates.
///
/// # Errors
/// Returns an error if its logit is NaN or infinite.
pub(crate) fn choose(row: &[f32]) -> Result<u32> {
    let (token, logit) = pick(row);
    check(logit, token as usize).map(|()| token)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition.
    fn slow(values: &[f32]) -> usize {
        let nan = values.iter().position(|value| value.is_nan());
        let greater = |best: usize, i: usize| if values[i] > values[best] { i } else { best };
        nan.or_else(|| (0..values.len()).reduce(greater)).unwrap_or(0)
    }

    proptest! {
        #[test]
        fn the_greatest_is_found_at_its_lowest_place(
            values in prop::collection::vec(
                prop_oneof![
                    8 => (-3i8..3).prop_map(f32::from), 1 => Just(-0.0), 1 => Just(f32::NEG_INFINITY), 1 => Just(f32::NAN)
                ],
                0..100,
            ),
        ) {
            let (value, at) = argmax(&values);
            prop_assert_eq!(at, slow(&values));
            let there = values.get(at).copied().unwrap_or(f32::NEG_INFINITY);
            prop_assert!(value == there || (value.is_nan() && there.is_nan()), "{} is not {}", value, there);
        }

        #[test]
        fn candidates_of_parts_choose_what_the_whole_row_does(
            rows in prop::collection::vec(prop::collection::vec(-4i8..5, 12), 1..4), ranks in 1usize..9,
        ) {
            let logit = |v: &i8| if *v == 4 { f32::NAN } else { f32::from(*v) };
            let values: Vec<f32> = rows.iter().flatten().map(logit).collect();
            // With 5 ranks of 3 or 8 of 2, the last have no tokens.
            let width = 12usize.div_ceil(ranks);
            let of_rank = |rank: usize| {
                let tokens = 12.min(rank * width)..12.min((rank + 1) * width);
                let part = rows.iter().flat_map(|row| row[tokens.clone()].iter().map(logit));
                let part = Tensor::new(&[rows.len(), tokens.len()], part.collect(), DType::F32).unwrap();
                candidates(&part, &tokens).unwrap().values().unwrap().into_owned()
            };
            let ranks: Vec<Vec<f32>> = (0..ranks).map(of_rank).collect();
            let of_row = |row: usize| ranks.iter().flat_map(move |of| of[2 * row..2 * row + 2].to_vec());
            let gathered: Vec<f32> = (0..rows.len()).flat_map(of_row).collect();
            let expected: Vec<u32> = values.chunks(12).map(|row| slow(row) as u32).collect();
            let got: Vec<u32> = gathered.chunks_exact(2 * ranks.len()).map(|row| pick(row).0).collect();
            prop_assert_eq!(got, expected);
        }
    }

    #[test]
    fn logits_that_are_no_finite_numbers_name_their_token() {
        let said = |pairs: &[f32]| choose(pairs).unwrap_err().to_string();
        assert!(said(&[1.0, 3.0, f32::NAN, 70.0]).contains("the logit of token 70 is not a number"));
        assert!(said(&[1.0, 3.0, f32::INFINITY, 70.0]).contains("that of token 70, is inf"));
        assert!(said(&[f32::NEG_INFINITY, 0.0]).contains("is -inf"));
        assert!(most_likely(&[]).is_err() && choose(&[]).is_err());
        assert_eq!(pick(&[1.0, 3.0, f32::NAN, 70.0]).0, 70);
    }
}
