//! The kernels, compiled at first use for the types and shapes at hand.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Mutex;

use ryzanstein_process_group::device::{Device, Kernel};

use super::memory::lock;
use crate::dtype::Dtype;
use crate::error::Result;

const TYPES: &str = include_str!("kernels/types.cu");
const ROWS: &str = include_str!("kernels/rows.cu");
const VECTOR: &str = include_str!("kernels/vector.cu");
const ATTENTION: &str = include_str!("kernels/attention.cu");

/// What a source is compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Source {
    /// Operations on elements and rows: activations, and another operand.
    Rows(Dtype, Dtype),
    /// Matrix times vector: type of the vector, of the matrix and of the product.
    Vector(Dtype, Dtype, Dtype),
    /// Attention: type, length of a head, query heads a key/value head.
    Attention(Dtype, usize, usize),
}

impl Source {
    fn name(self) -> &'static str {
        match self {
            Self::Rows(..) => "rows.cu",
            Self::Vector(..) => "vector.cu",
            Self::Attention(..) => "attention.cu",
        }
    }

    /// The whole text to compile.
    pub(super) fn text(self) -> String {
        let (source, defined): (_, Vec<(&str, String)>) = match self {
            Self::Rows(element, other) => {
                (ROWS, vec![("ELEMENT", element.to_string()), ("OTHER", other.to_string())])
            }
            Self::Vector(element, other, result) => (
                VECTOR,
                vec![
                    ("ELEMENT", element.to_string()),
                    ("OTHER", other.to_string()),
                    ("RESULT", result.to_string()),
                ],
            ),
            Self::Attention(element, head_dim, group) => (
                ATTENTION,
                vec![
                    ("ELEMENT", element.to_string()),
                    ("HEAD_DIM", head_dim.to_string()),
                    ("GROUP", group.to_string()),
                ],
            ),
        };
        let mut text = String::new();
        for (name, value) in defined {
            let _ = writeln!(text, "#define {name} {value}");
        }
        text + TYPES + source
    }
}

/// Kernels that have been used.
#[derive(Debug, Default)]
pub(super) struct Kernels {
    loaded: Mutex<HashMap<(Source, &'static str), Kernel>>,
}

impl Kernels {
    /// A kernel of a source, compiled now unless it has been before.
    pub(super) fn get(&self, device: &Device, source: Source, name: &'static str) -> Result<Kernel> {
        if let Some(kernel) = lock(&self.loaded).get(&(source, name)) {
            return Ok(kernel.clone());
        }
        let kernel = device.kernels().module(source.name(), &source.text(), &[])?.kernel(name)?;
        lock(&self.loaded).insert((source, name), kernel.clone());
        Ok(kernel)
    }
}
