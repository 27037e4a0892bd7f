//! Checks of the operands' shapes for each operation, the same on the host and on a GPU. Pure.

use std::ops::Range;

use ryzanstein_process_group::DType;

use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Returns the rows of `x`, the inputs and the outputs of `x · weightᵀ + bias`.
pub(super) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<[usize; 3]> {
    let (m, k, n) = (x.rows(), x.columns(), weight.rows());
    if weight.columns() != k {
        return Err(Error::shape_mismatch("linear", x, weight));
    }
    match bias.filter(|bias| bias.count() != n) {
        Some(bias) => Err(Error::shape_mismatch("bias", weight, bias)),
        None => Ok([m, k, n]),
    }
}

/// Returns the rows of `x`, the inputs of a leaf, and the outputs.
pub(super) fn linear_of_leaves(x: &Tensor, weight: &Tensor, leaves: usize) -> Result<[usize; 3]> {
    let (m, k) = (x.rows(), weight.columns());
    if x.shape().len() != 2
        || leaves == 0
        || leaves.checked_mul(k) != Some(x.columns())
        || !weight.rows().is_multiple_of(leaves)
    {
        return Err(Error::shape_mismatch("linear of leaves", x, weight));
    }
    Ok([m, k, weight.rows() / leaves])
}

/// Returns number, rows and columns of terms.
pub(super) fn sum_of_leaves(terms: &Tensor) -> Result<[usize; 3]> {
    match *terms.shape() {
        [count, rows, columns] if count > 0 && terms.dtype() == DType::F32 => Ok([count, rows, columns]),
        _ => Err(Error::input(format!(
            "terms must be [count, rows, columns] of f32, not {:?} of {}",
            terms.shape(),
            terms.dtype()
        ))),
    }
}

/// Checks that `y` has the shape of `x` or of one of its rows.
pub(super) fn add(x: &Tensor, y: &Tensor) -> Result<()> {
    let one_row = y.shape().len() == 1 && y.count() == x.columns();
    if one_row || y.shape() == x.shape() { Ok(()) } else { Err(Error::shape_mismatch("add", x, y)) }
}

/// Checks that the weight is as long as a row.
pub(super) fn rms_norm(x: &Tensor, weight: &Tensor) -> Result<()> {
    if weight.count() == x.columns() { Ok(()) } else { Err(Error::shape_mismatch("norm", x, weight)) }
}

/// Returns the width of gate and of up.
pub(super) fn swiglu(x: &Tensor) -> Result<usize> {
    if x.columns().is_multiple_of(2) {
        return Ok(x.columns() / 2);
    }
    Err(Error::input(format!("gate and up must be equally wide; {} columns are odd", x.columns())))
}

/// Returns rows and width of the blocks, which together have these columns.
pub(super) fn select_columns(blocks: &Tensor, columns: &Range<usize>) -> Result<[usize; 2]> {
    let (count, rows, width) = match *blocks.shape() {
        [rows, width] => (1, rows, width),
        [count, rows, width] => (count, rows, width),
        _ => {
            return Err(Error::input(format!(
                "columns are of a matrix or of blocks [blocks, rows, columns], not of {:?}",
                blocks.shape()
            )));
        }
    };
    if columns.start <= columns.end && columns.end <= count * width {
        return Ok([rows, width]);
    }
    Err(Error::input(format!("a tensor of shape {:?} has no columns {columns:?}", blocks.shape())))
}
