//! How long data-parallel training takes to add up the gradients of well-known models.
//!
//! Tables of this kind often go wrong in the same places, and this one does not: a ring moves 2(n−1)/n of the gradients, not twice
//! all of them; bandwidths are of one direction, where NVLink's advertised ones are of both; and InfiniBand and Ethernet are
//! named by Gb/s, of which eight make a GB/s (HDR is 200 Gb/s, 25 GB/s).

use super::{AllReduce, Interconnect};

/// A model as data-parallel training sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gradients {
    /// The model.
    pub model: &'static str,
    /// Its parameters.
    pub parameters: u64,
}

impl Gradients {
    /// Bytes of all gradients in f32.
    pub const fn bytes(&self) -> u64 {
        4 * self.parameters
    }

    /// Seconds of one all-reduce of all gradients by a ring, with nothing else on the links and no overlap with computing.
    pub fn seconds(&self, ranks: usize, interconnect: Interconnect) -> f64 {
        AllReduce::Ring.cost(ranks, self.bytes() as f64).seconds(interconnect.link())
    }
}

/// Four models, smallest first.
pub const GRADIENTS: [Gradients; 4] = [
    // torchvision's resnet50.
    Gradients { model: "ResNet-50", parameters: 25_557_032 },
    // bert-large-uncased.
    Gradients { model: "BERT-Large", parameters: 335_141_888 },
    // gpt2-xl.
    Gradients { model: "GPT-2", parameters: 1_557_611_200 },
    // T. Brown et al., "Language Models are Few-Shot Learners", 2020. No single GPU holds it: each adds up a shard.
    Gradients { model: "GPT-3", parameters: 175_000_000_000 },
];

/// One model's row of the table.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GradientRow {
    /// The model.
    pub gradients: Gradients,
    /// Seconds on each of [`Interconnect::ALL`], in that order.
    pub seconds: [f64; Interconnect::ALL.len()],
}

/// The time to add up the gradients of each model on each interconnect, among so many ranks.
pub fn gradient_table(ranks: usize) -> [GradientRow; GRADIENTS.len()] {
    GRADIENTS.map(|gradients| GradientRow {
        gradients,
        seconds: Interconnect::ALL.map(|interconnect| gradients.seconds(ranks, interconnect)),
    })
}
