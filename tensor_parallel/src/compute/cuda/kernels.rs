//! The kernels, compiled at first use for the required types and shapes.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use ryzanstein_process_group::DType;
use ryzanstein_process_group::device::Kernel;

use super::attention::Variant;
use super::gemm::Tiles;
use super::linear::COLUMNS;
use super::rows::{PART, PART_THREADS};
use super::skinny::Strips;
use crate::checkpoint::LEAVES;
use crate::compute::batch::PAGE_SIZE;
use crate::error::Result;
use crate::gpu::{DeviceArray, Gpu, lock};
use crate::tensor::{Tensor, element_count};

const TYPES: &str = include_str!("kernels/types.cu");
const ROWS: &str = include_str!("kernels/rows.cu");
const SIMT: &str = include_str!("kernels/simt.cu");
const SKINNY: &str = concat!(include_str!("kernels/mma.cu"), include_str!("kernels/skinny.cu"));
const GEMM: &str = concat!(
    include_str!("kernels/mma.cu"),
    include_str!("kernels/wgmma.cu"),
    include_str!("kernels/gemm.cu")
);
const ATTENTION: &str = concat!(
    include_str!("kernels/attention.cu"),
    include_str!("kernels/mma.cu"),
    include_str!("kernels/wgmma.cu"),
    include_str!("kernels/softmax.cu"),
    include_str!("kernels/prefill.cu"),
    include_str!("kernels/prefill_mma.cu"),
    include_str!("kernels/prefill_wgmma.cu"),
    include_str!("kernels/decode_wgmma.cu"),
);

/// A source file and the parameters of its compilation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Source {
    /// Operations on elements and rows: the types of the activations and of the other operand.
    Rows(DType, DType),
    /// Products without tensor cores: the types of the operands and of the product, and the leaves of a sum.
    Simt(DType, DType, DType, usize),
    /// Products on tensor cores: the type of the operands and that of the product.
    Skinny(DType, DType, Strips),
    Gemm(DType, DType, Tiles),
    /// Attention: type, length of a head, query heads per key/value head, and the variant.
    Attention(DType, usize, usize, Variant),
}

impl Source {
    fn name(self) -> &'static str {
        match self {
            Self::Rows(..) => "rows.cu",
            Self::Simt(..) => "simt.cu",
            Self::Skinny(..) => "skinny.cu",
            Self::Gemm(..) => "gemm.cu",
            Self::Attention(..) => "attention.cu",
        }
    }

    /// Returns the complete source text.
    pub(super) fn text(self) -> String {
        let of_product = |element: DType, result: DType, mut macros: Vec<_>| {
            macros.extend([("ELEMENT", element.to_string()), ("RESULT", result.to_string())]);
            macros
        };
        let (source, defined): (_, Vec<(&str, String)>) = match self {
            Self::Rows(element, other) => (
                ROWS,
                vec![
                    ("ELEMENT", element.to_string()),
                    ("OTHER", other.to_string()),
                    ("LEAVES", LEAVES.to_string()),
                    ("PART", PART.to_string()),
                    ("PART_THREADS", PART_THREADS.to_string()),
                ],
            ),
            Self::Simt(element, other, result, leaves) => (
                SIMT,
                of_product(
                    element,
                    result,
                    vec![
                        ("OTHER", other.to_string()),
                        ("LEAVES", leaves.to_string()),
                        ("COLUMNS", COLUMNS.to_string()),
                    ],
                ),
            ),
            Self::Skinny(element, result, strips) => (SKINNY, of_product(element, result, strips.macros())),
            Self::Gemm(element, result, tiles) => (GEMM, of_product(element, result, tiles.macros())),
            Self::Attention(element, head_dim, group, variant) => (
                ATTENTION,
                vec![
                    ("ELEMENT", element.to_string()),
                    ("WGMMA_N", head_dim.to_string()),
                    ("HEAD_DIM", head_dim.to_string()),
                    ("GROUP", group.to_string()),
                    ("PAGE_SIZE", PAGE_SIZE.to_string()),
                    (variant.name(), String::new()),
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

/// Kernels that have been loaded.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) gpu: Arc<Gpu>,
    loaded: Mutex<HashMap<(Source, &'static str), Kernel>>,
}

impl Kernels {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), loaded: Mutex::default() }
    }

    /// Allocates a result from the pool of the GPU.
    pub(super) fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let count = element_count(shape, dtype)?;
        let array = DeviceArray::new(self.gpu.scratch(count * dtype.size())?, dtype, count);
        Ok(Tensor::from_device(shape, array))
    }

    /// Returns a kernel of a source. Compiles it at first use.
    pub(super) fn get(&self, source: Source, name: &'static str) -> Result<Kernel> {
        if let Some(kernel) = lock(&self.loaded).get(&(source, name)) {
            return Ok(kernel.clone());
        }
        let module = self.gpu.device.kernels().module(source.name(), &source.text(), &[])?;
        let kernel = module.kernel(name)?;
        lock(&self.loaded).insert((source, name), kernel.clone());
        Ok(kernel)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use ryzanstein_config::DeviceConfig;
    use ryzanstein_process_group::device::{Libraries, LibrarySearch, compile_for};

    use super::super::skinny::GPUS;
    use super::*;

    #[test]
    #[ignore = "needs NVRTC, not a GPU"]
    fn every_source_compiles_for_every_type_and_a_choice_of_heads() {
        let search = LibrarySearch::from_variables(|name| std::env::var(name).ok());
        let libraries = Libraries::find(&DeviceConfig::default(), &search);
        let nvrtc = &libraries.nvrtc.as_ref().unwrap().functions;
        let types = [DType::F32, DType::F16, DType::BF16];
        for capability in [(8, 0), (9, 0)] {
            let mut sources = Vec::new();
            for element in types {
                for other in types {
                    sources.push(Source::Rows(element, other));
                    for leaves in [1, 3, LEAVES] {
                        sources.extend(types.map(|result| Source::Simt(element, other, result, leaves)));
                    }
                }
                if element != DType::F32 {
                    for result in [element, DType::F32] {
                        let gpus = if capability == (9, 0) { &GPUS[..1] } else { &GPUS[1..] };
                        let strips: HashSet<_> = gpus.iter().flat_map(|gpu| Strips::all(*gpu)).collect();
                        sources.extend(strips.into_iter().map(|s| Source::Skinny(element, result, s)));
                        if capability == (9, 0) {
                            sources
                                .extend(Tiles::all().into_iter().map(|t| Source::Gemm(element, result, t)));
                        }
                    }
                }
                for (head_dim, group) in [(2, 1), (6, 2), (64, 7), (64, 71), (80, 1), (128, 8), (256, 16)] {
                    let variant = Variant::choose(element, head_dim, capability);
                    sources.push(Source::Attention(element, head_dim, group, variant));
                }
            }
            for source in sources {
                let code = compile_for(nvrtc, capability, source.name(), &source.text(), &[]);
                assert!(code.is_ok_and(|code| !code.is_empty()), "{source:?} for {capability:?}");
            }
        }
    }
}
