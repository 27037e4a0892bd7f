//! The time that data-parallel training takes to add up the gradients of well-known models.
//!
//! Tables of this kind often contain the same errors, which this one avoids: a ring moves 2(n−1)/n of the gradients, not twice
//! all of them; bandwidths are of one direction, where NVLink's advertised ones are of both; and InfiniBand and Ethernet are
//! named by Gb/s, of which eight make a GB/s (HDR is 200 Gb/s, 25 GB/s).

use ryzanstein_process_group::schedule::build::CollectiveSpec;
use ryzanstein_process_group::schedule::cost::{LinkModel, estimate};
use ryzanstein_process_group::schedule::{Algorithm, Hosts};
use ryzanstein_process_group::{Operation, ReduceOp, units};
use serde::Serialize;

use crate::interconnect::Interconnect;
use ryzanstein_orchestrator::table::{Cell, Column, Screen, table, wrap};

/// Times of an all-reduce of the gradients of known models on each interconnect.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SyncTimes {
    /// The number of ranks.
    pub ranks: usize,
    /// The models.
    pub models: Vec<Model>,
    /// The interconnects.
    pub interconnects: Vec<On>,
}

/// A model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Model {
    /// Name of the model.
    pub name: &'static str,
    /// Number of its parameters.
    pub parameters: u64,
    /// Bytes of its gradients in f32.
    pub bytes: u64,
}

/// The times on an interconnect.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct On {
    /// The name of the interconnect.
    pub name: &'static str,
    /// Bandwidth of one direction, in 10⁹ bytes per second.
    pub gbs: f64,
    /// Latency of a step that moves nothing, in microseconds.
    pub latency_us: f64,
    /// Seconds for each model, in the order of `models`.
    pub seconds: Vec<f64>,
}

/// Four models with their parameters, smallest first.
const MODELS: [(&str, u64); 4] = [
    // torchvision's resnet50.
    ("ResNet-50", 25_557_032),
    // bert-large-uncased.
    ("BERT-Large", 335_141_888),
    // gpt2-xl.
    ("GPT-2", 1_557_611_200),
    // T. Brown et al., "Language Models are Few-Shot Learners", 2020. No single GPU holds it: each reduces a shard.
    ("GPT-3", 175_000_000_000),
];

/// Returns the seconds of one all-reduce of f32 gradients by a ring, with nothing else on the links and no overlap with computing.
fn seconds(parameters: u64, ranks: usize, interconnect: Interconnect) -> f64 {
    let operation = Operation::AllReduce(ReduceOp::Sum);
    let spec =
        CollectiveSpec { operation, algorithm: Algorithm::Ring, count: parameters as usize, in_place: true };
    let model = LinkModel::bound(interconnect.cost(), ranks);
    estimate(spec, &Hosts::one(ranks), size_of::<f32>(), &model).as_secs_f64()
}

/// Ways to shorten a training step's wait for its gradients.
const ADVICE: &str = "To wait less: accumulate the gradients of several batches before a step, or enlarge the batch of each \
GPU; send 16 bits (all_reduce_compressed); reduce during the backward pass (BucketedReducer).";

impl SyncTimes {
    /// Computes the times for `ranks` ranks.
    pub fn new(ranks: usize) -> Self {
        let models = MODELS.map(|(name, parameters)| Model { name, parameters, bytes: 4 * parameters });
        let interconnects = Interconnect::ALL.map(|interconnect| On {
            name: interconnect.name,
            gbs: interconnect.gbs,
            latency_us: interconnect.latency * 1e6,
            seconds: MODELS.map(|(_, parameters)| seconds(parameters, ranks, interconnect)).into(),
        });
        Self { ranks, models: models.into(), interconnects: interconnects.into() }
    }

    /// Formats the table for people.
    pub fn table(&self, screen: Screen) -> String {
        let heads = self.models.iter().map(|model| Column::right(model.name));
        let columns: Vec<Column<'_>> =
            [Column::left("interconnect"), Column::right("GB/s")].into_iter().chain(heads).collect();
        let bytes = self.models.iter().map(|model| units::bytes(model.bytes as f64).into());
        let first: Vec<Cell> = ["gradients".into(), "".into()].into_iter().chain(bytes).collect();
        let on = |on: &On| {
            let times = on.seconds.iter().map(|seconds| units::time(seconds * 1e6).into());
            [on.name.into(), short(on.gbs).into()].into_iter().chain(times).collect()
        };
        let rows: Vec<Vec<Cell>> = [first].into_iter().chain(self.interconnects.iter().map(on)).collect();
        let heading = format!(
            "Time of one ring all-reduce of a model's f32 gradients on {} ranks, at the published one-way bandwidth",
            self.ranks
        );
        format!(
            "{}\n\n{}\n{}\n",
            wrap(&heading, 0, screen),
            table(&columns, &rows, screen),
            wrap(ADVICE, 0, screen)
        )
    }
}

/// Formats a value with at most three decimals, without trailing zeros.
fn short(value: f64) -> String {
    format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').into()
}
