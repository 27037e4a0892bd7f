//! The nodes of a decode pass: where its time goes.

use ryzanstein_orchestrator::table;
use ryzanstein_tensor_parallel::model::LlamaConfig;

use crate::cupti::Kernel;
use crate::measure::median;

/// The kernels of our products.
pub const PRODUCTS: [&str; 3] = ["skinny", "gemm", "simt"];
/// Parts of the names of the library's kernels, several of which may compute one product.
const LIBRARY: [&str; 5] = ["gemm", "gemv", "nvjet", "splitK", "cublas"];
/// The kernels of the attention of a pass. The second one takes single tokens where only it keeps the bits of invariant numerics.
const ATTENTION: [&str; 2] = ["decode", "prefill"];
/// The maximum length of a printed name.
const NAME: usize = 36;

/// The bytes that the nodes of a pass read, on one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reads {
    /// The weights of each product, in the order of the pass.
    products: Vec<usize>,
    /// The keys and values of each layer.
    attention: Vec<usize>,
}

impl Reads {
    /// Returns what a pass of `sequences` sequences after `positions` positions reads on one of `world_size` ranks. Elements have
    /// `size` bytes.
    pub fn new(
        config: &LlamaConfig,
        size: usize,
        world_size: usize,
        sequences: usize,
        positions: usize,
    ) -> Self {
        let LlamaConfig { hidden, intermediate, heads, kv_heads, head_dim, vocabulary, .. } = *config;
        // Ranks that are more than the key and value heads share them.
        let (heads, kv_heads) = (heads / world_size, kv_heads.div_ceil(world_size));
        let inner = intermediate / world_size;
        let layer = [
            hidden * (heads + 2 * kv_heads) * head_dim,
            heads * head_dim * hidden,
            2 * hidden * inner,
            inner * hidden,
        ];
        let head = vocabulary.div_ceil(world_size) * hidden;
        let seen = |layer: usize| match config.sliding_windows.get(layer) {
            Some(Some(window)) => positions.min(*window),
            _ => positions,
        };
        let attention = |layer| 2 * sequences * seen(layer) * kv_heads * head_dim * size;
        Self {
            products: (0..config.layers)
                .flat_map(|_| layer)
                .chain([head])
                .map(|count| count * size)
                .collect(),
            attention: (0..config.layers).map(attention).collect(),
        }
    }

    /// Returns the sum of all.
    pub fn total(&self) -> usize {
        self.products.iter().chain(&self.attention).sum()
    }
}

/// A node of a pass. Times are medians over passes, in microseconds.
#[derive(Clone, PartialEq, Debug)]
struct Node {
    name: String,
    /// From its first block to its last.
    time: f64,
    /// From the end of the node before to its start; negative if it starts earlier.
    gap: f64,
    /// From the end of the node before to its own: its part of the pass.
    adds: f64,
    bytes: Option<usize>,
}

fn is_of_library(name: &str) -> bool {
    !PRODUCTS.contains(&name) && LIBRARY.iter().any(|part| name.contains(part))
}

/// Combines the kernels of several equal passes, in the order in which they ended.
fn nodes(kernels: &[Kernel], passes: usize, reads: &Reads) -> Option<Vec<Node>> {
    let count = kernels.len() / passes.max(1);
    let runs: Vec<&[Kernel]> = kernels.chunks_exact(count.max(1)).collect();
    let same = |run: &&[Kernel]| run.iter().map(|k| &k.name).eq(runs[0].iter().map(|k| &k.name));
    if count == 0 || count * passes != kernels.len() || !runs.iter().all(same) {
        return None;
    }
    let (mut products, mut attention) = (reads.products.iter().copied(), reads.attention.iter().copied());
    let mut nodes: Vec<Node> = Vec::new();
    for at in 0..count {
        let us = |of: &dyn Fn(&[Kernel]) -> f64| median(runs.iter().map(|run| of(run) / 1e3).collect());
        let end_before = |run: &[Kernel]| if at == 0 { run[0].start } else { run[at - 1].end };
        let name = &runs[0][at].name;
        let continues = is_of_library(name) && nodes.last().is_some_and(|node| is_of_library(&node.name));
        let bytes = match name.as_str() {
            _ if continues => None,
            name if ATTENTION.contains(&name) => attention.next(),
            name if PRODUCTS.contains(&name) || is_of_library(name) => products.next(),
            _ => None,
        };
        nodes.push(Node {
            name: name.clone(),
            time: us(&|run| (run[at].end - run[at].start) as f64),
            gap: us(&|run| run[at].start as f64 - end_before(run) as f64),
            adds: us(&|run| run[at].end as f64 - end_before(run) as f64),
            bytes,
        });
    }
    (products.next(), attention.next()).eq(&(None, None)).then_some(nodes)
}

/// Formats the nodes of `passes` equal passes, of which `kernels` are all. `bandwidth` is that of the memory in bytes per second.
/// Returns `None` if the kernels are not those of equal passes with these products.
pub fn table(kernels: &[Kernel], passes: usize, reads: &Reads, bandwidth: f64) -> Option<String> {
    let nodes = nodes(kernels, passes, reads)?;
    let share = |bytes: usize, us: f64| {
        [format!("{:.1}", bytes as f64 / 1e6), format!("{:.0} %", bytes as f64 / us / bandwidth * 1e8)]
    };
    let row = |Node { name, time, gap, adds, bytes }: &Node| {
        let short: String = name.chars().take(NAME).collect();
        let mut row = vec![short, format!("{time:.2}"), format!("{gap:.2}"), format!("{adds:.2}")];
        row.extend(bytes.map_or_else(|| [const { String::new() }; 2], |bytes| share(bytes, *adds)));
        row
    };
    let mut rows: Vec<_> = nodes.iter().map(row).collect();
    let whole: f64 = nodes.iter().map(|node| node.adds).sum();
    let [read, part] = share(reads.total(), whole);
    rows.push(vec!["all".into(), String::new(), String::new(), format!("{whole:.2}"), read, part]);
    Some(table::columns(&["node", "µs", "gap", "adds", "MB", "of bandwidth"], 1, &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(name: &str, start: u64, end: u64) -> Kernel {
        Kernel { name: name.into(), start, end, is_node: true }
    }

    #[test]
    fn a_product_of_two_kernels_has_its_weights_once_and_overlap_is_a_negative_gap() {
        let reads = Reads { products: vec![4_000_000, 2_000_000, 1_000_000], attention: vec![1_000_000] };
        let pass = |from: u64| {
            [
                kernel("nvjet_hsh", from, from + 2000),
                kernel("void splitKreduce_kernel", from + 1500, from + 2500),
                kernel("decode", from + 3000, from + 4000),
                kernel("simt", from + 4000, from + 5000),
                kernel("simt", from + 5000, from + 6000),
            ]
        };
        let kernels = [pass(0), pass(100_000)].concat();
        let nodes = nodes(&kernels, 2, &reads).unwrap();
        let of = |node: &Node| (node.time, node.gap, node.adds, node.bytes);
        assert_eq!(
            nodes.iter().map(of).collect::<Vec<_>>(),
            [
                (2.0, 0.0, 2.0, Some(4_000_000)),
                (1.0, -0.5, 0.5, None),
                (1.0, 0.5, 1.5, Some(1_000_000)),
                (1.0, 0.0, 1.0, Some(2_000_000)),
                (1.0, 0.0, 1.0, Some(1_000_000)),
            ]
        );
        let text = table(&kernels, 2, &reads, 4e12).unwrap();
        assert!(text.contains("simt") && text.contains("50 %"), "{text}");
    }

    #[test]
    fn kernels_of_other_passes_have_no_table() {
        let reads = Reads { products: vec![1], attention: vec![1] };
        let pass = [kernel("gemm", 0, 1), kernel("decode", 2, 3)];
        assert!(nodes(&pass, 1, &reads).is_some());
        assert!(nodes(&pass, 2, &reads).is_none(), "passes differ");
        assert!(nodes(&pass[1..], 1, &reads).is_none(), "a product is missing");
        assert!(nodes(&[], 1, &reads).is_none(), "nothing was recorded");
    }
}
