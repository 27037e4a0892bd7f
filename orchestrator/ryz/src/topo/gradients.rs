//! The time that data-parallel training takes to add up the gradients of well-known models.
//!
//! Tables of this kind often contain the same errors, which this one avoids: a ring moves 2(n−1)/n of the gradients, not twice
//! all of them; bandwidths are of one direction, where NVLink's advertised ones are of both; and InfiniBand and Ethernet are
//! named by Gb/s, of which eight make a GB/s (HDR is 200 Gb/s, 25 GB/s).

use ryzanstein_process_group::schedule::build::CollectiveSpec;
use ryzanstein_process_group::schedule::cost::{LinkModel, estimate};
use ryzanstein_process_group::schedule::{Algorithm, Hosts};
use ryzanstein_process_group::{Operation, ReduceOp};

use crate::interconnect::Interconnect;

/// The gradients of a model in data-parallel training.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Gradients {
    /// Name of the model.
    pub(super) model: &'static str,
    /// Number of its parameters.
    pub(super) parameters: u64,
}

impl Gradients {
    /// Returns the bytes of all gradients in f32.
    pub(super) const fn bytes(&self) -> u64 {
        4 * self.parameters
    }

    /// Returns the seconds of one all-reduce of all gradients by a ring, with nothing else on the links and no overlap with
    /// computing.
    pub(super) fn seconds(&self, ranks: usize, interconnect: Interconnect) -> f64 {
        let operation = Operation::AllReduce(ReduceOp::Sum);
        let count = self.parameters as usize;
        let spec = CollectiveSpec { operation, algorithm: Algorithm::Ring, count, in_place: true };
        let model = LinkModel::bound(interconnect.cost(), ranks);
        estimate(spec, &Hosts::one(ranks), size_of::<f32>(), &model).as_secs_f64()
    }
}

/// Four models, smallest first.
pub(super) const GRADIENTS: [Gradients; 4] = [
    // torchvision's resnet50.
    Gradients { model: "ResNet-50", parameters: 25_557_032 },
    // bert-large-uncased.
    Gradients { model: "BERT-Large", parameters: 335_141_888 },
    // gpt2-xl.
    Gradients { model: "GPT-2", parameters: 1_557_611_200 },
    // T. Brown et al., "Language Models are Few-Shot Learners", 2020. No single GPU holds it: each reduces a shard.
    Gradients { model: "GPT-3", parameters: 175_000_000_000 },
];

/// One model's row of the table.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct GradientRow {
    /// The model.
    pub(super) gradients: Gradients,
    /// Seconds on each of [`Interconnect::ALL`], in that order.
    pub(super) seconds: [f64; Interconnect::ALL.len()],
}

/// Returns the time of an all-reduce of each model's gradients on each interconnect.
pub(super) fn gradient_table(ranks: usize) -> [GradientRow; GRADIENTS.len()] {
    GRADIENTS.map(|gradients| GradientRow {
        gradients,
        seconds: Interconnect::ALL.map(|interconnect| gradients.seconds(ranks, interconnect)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_gradients_has_the_published_sizes_and_the_times_of_a_ring() {
        let gigabytes = GRADIENTS.map(|model| (model.bytes() as f64 / 1e8).round() / 10.0);
        assert_eq!(gigabytes, [0.1, 1.3, 6.2, 700.0]);
        let table = gradient_table(8);
        let at = |interconnect| Interconnect::ALL.iter().position(|i| *i == interconnect).unwrap();
        // 102 MB, of which a ring of eight moves 7/4, at 25 GB/s.
        let hdr = table[0].seconds[at(Interconnect::InfinibandHdr)];
        assert!((hdr / 7.19e-3 - 1.0).abs() < 0.01, "{hdr}");
        let nvlink = table[1].seconds[at(Interconnect::NvLink3)];
        assert!((nvlink / 7.83e-3 - 1.0).abs() < 0.01, "{nvlink}");
        assert!(
            table.windows(2).all(|rows| rows[0].seconds.iter().zip(rows[1].seconds).all(|(a, b)| *a < b))
        );
    }
}
