//! A ring all-reduce step by step, and what simpler ways to average cost: `cargo run -p ryzanstein-examples --example ring_steps`.
//!
//! It executes the programs of sends, receives and reductions that the backend for CPUs executes, one rank after another. In a
//! step, each rank sends at most one message and receives at most one, as with a single link.

use std::collections::VecDeque;

use ryzanstein_process_group::schedule::build::{CollectiveSpec, build};
use ryzanstein_process_group::schedule::program::{Node, Program, Region, Source, Space};
use ryzanstein_process_group::schedule::{Algorithm, Hosts};
use ryzanstein_process_group::{Operation, Rank, ReduceOp};

const RANKS: usize = 4;
/// Elements of a vector, one for each chunk of the ring.
const COUNT: usize = RANKS;

/// A rank between two steps.
struct RankState {
    program: VecDeque<Node>,
    memory: [Vec<f32>; 3],
    /// Messages that have arrived, each with its sender.
    arrived: Vec<(usize, Vec<f32>)>,
}

impl RankState {
    fn new(Program { nodes, scratch }: Program, vector: Vec<f32>, is_in_place: bool) -> Self {
        let (input, mut output) = if is_in_place { (Vec::new(), vector) } else { (vector, Vec::new()) };
        // The root of a gather gets a vector from each rank.
        output.resize(RANKS * COUNT, 0.0);
        Self { program: nodes.into(), memory: [input, output, vec![0.0; scratch]], arrived: Vec::new() }
    }

    fn at(&mut self, region: Region) -> &mut [f32] {
        let memory = match region.space {
            Space::Input => 0,
            Space::Output => 1,
            Space::Scratch => 2,
        };
        &mut self.memory[memory][region.start..region.end]
    }

    fn take(&mut self, sender: usize) -> Option<Vec<f32>> {
        let first = self.arrived.iter().position(|(from, _)| *from == sender)?;
        Some(self.arrived.remove(first).1)
    }

    /// Executes receives and reductions until the next send, or until a message is missing.
    fn advance(&mut self) {
        while let Some(node) = self.program.front().cloned() {
            let result = match &node {
                Node::Send { .. } => return,
                Node::Receive { from, .. } => self.take(*from),
                Node::Reduce { sources, .. } => self.reduce(sources),
            };
            let Some(result) = result else { return };
            self.at(node.region()).copy_from_slice(&result);
            self.program.pop_front();
        }
    }

    fn reduce(&mut self, sources: &[Source]) -> Option<Vec<f32>> {
        let is_there = |source: &Source| match source {
            Source::Peer(peer) => self.arrived.iter().any(|(from, _)| from == peer),
            Source::Own(_) => true,
        };
        if !sources.iter().all(is_there) {
            return None;
        }
        let mut operands = sources.iter().map(|source| match source {
            Source::Peer(peer) => self.take(*peer),
            Source::Own(region) => Some(self.at(*region).to_vec()),
        });
        let first = operands.next()??;
        operands.try_fold(first, |sum, operand| Some(sum.iter().zip(operand?).map(|(a, b)| a + b).collect()))
    }
}

/// The traffic of a collective, in elements.
#[derive(Default)]
struct Moved {
    steps: usize,
    sent: [usize; RANKS],
    received: [usize; RANKS],
    /// The sum over the steps of the longest message of each: what one link carries, message after message.
    in_sequence: usize,
}

/// Executes a collective on these vectors and returns the ranks' outputs. `show` sees each step: its messages, and the ranks.
fn execute(
    (operation, algorithm): (Operation, Algorithm),
    vectors: Vec<Vec<f32>>,
    moved: &mut Moved,
    show: impl Fn(&str, &[RankState]),
) -> Vec<Vec<f32>> {
    let in_place = !matches!(operation, Operation::Gather { .. });
    let spec = CollectiveSpec { operation, algorithm, count: COUNT, in_place };
    let program = |rank| {
        let mut program = build(spec, rank, &Hosts::one(RANKS));
        // Empty messages carry no data: in rooted collectives, they only compare the calls.
        program.nodes.retain(|node| !node.region().is_empty());
        program
    };
    let ranks = vectors.into_iter().enumerate();
    let mut ranks: Vec<_> =
        ranks.map(|(rank, vector)| RankState::new(program(rank), vector, in_place)).collect();
    ranks.iter_mut().for_each(RankState::advance);
    while ranks.iter().any(|rank| !rank.program.is_empty()) {
        let (mut messages, mut is_receiving, mut longest) = (Vec::new(), [false; RANKS], 0);
        for from in 0..RANKS {
            let Some(Node::Send { to, region }) = ranks[from].program.front().cloned() else { continue };
            if is_receiving[to] {
                continue;
            }
            is_receiving[to] = true;
            let elements = ranks[from].at(region).to_vec();
            ranks[to].arrived.push((from, elements));
            ranks[from].program.pop_front();
            moved.sent[from] += region.len();
            moved.received[to] += region.len();
            longest = longest.max(region.len());
            messages.push(format!("chunk {} from {from} to {to}", region.start));
        }
        ranks.iter_mut().for_each(RankState::advance);
        moved.steps += 1;
        moved.in_sequence += longest;
        show(&format!("step {}: {}", moved.steps, messages.join(", ")), &ranks);
    }
    ranks.into_iter().map(|rank| rank.memory.into_iter().nth(1).unwrap_or_default()).collect()
}

/// Rank `r` has `10^r` everywhere, so that a sum shows whose values are in it.
fn vectors() -> Vec<Vec<f32>> {
    (0..RANKS).map(|rank| vec![10_f32.powi(rank as i32); COUNT]).collect()
}

fn show_step(step: &str, ranks: &[RankState]) {
    println!("{step}");
    for (rank, state) in ranks.iter().enumerate() {
        print!("  rank {rank}:");
        state.memory[1][..COUNT].iter().for_each(|value| print!("{value:>6}"));
        println!();
    }
}

fn all_reduce(algorithm: Algorithm, show: impl Fn(&str, &[RankState])) -> Moved {
    let mut moved = Moved::default();
    let sums = execute((Operation::AllReduce(ReduceOp::Sum), algorithm), vectors(), &mut moved, show);
    assert!(sums.iter().all(|sum| sum[..COUNT] == [1111.0; COUNT]), "{sums:?}");
    moved
}

/// Rank 0 gets all vectors, averages, and sends the average to all.
fn gather_average_broadcast() -> Moved {
    let (mut moved, root) = (Moved::default(), Rank(0));
    let mut all = execute((Operation::Gather { root }, Algorithm::Direct), vectors(), &mut moved, |_, _| {});
    let average = |at| all[0].iter().skip(at).step_by(COUNT).sum::<f32>() / RANKS as f32;
    all[0] = (0..COUNT).map(average).collect();
    all[1..].iter_mut().for_each(|output| *output = vec![0.0; COUNT]);
    let all = execute((Operation::Broadcast { root }, Algorithm::Direct), all, &mut moved, |_, _| {});
    assert!(all.iter().all(|average| average[..COUNT] == [1111.0 / 4.0; COUNT]), "{all:?}");
    moved
}

fn main() {
    println!("Ring all-reduce on {RANKS} ranks, a chunk of the vector in each column:");
    let ring = all_reduce(Algorithm::Ring, show_step);
    println!("\nIn vectors of a rank:");
    println!("{:24}{:>6}{:>12}{:>14}{:>14}", "", "steps", "most sent", "most received", "in sequence");
    for (name, moved) in [
        ("ring", ring),
        ("everyone to everyone", all_reduce(Algorithm::Direct, |_, _| {})),
        ("gather, average, send", gather_average_broadcast()),
    ] {
        let vectors = |elements: usize| elements as f64 / COUNT as f64;
        let most = |elements: [usize; RANKS]| vectors(elements.into_iter().max().unwrap_or(0));
        println!(
            "{name:24}{:>6}{:>12}{:>14}{:>14}",
            moved.steps,
            most(moved.sent),
            most(moved.received),
            vectors(moved.in_sequence)
        );
    }
}
