//! Every schedule, for random world sizes and lengths, run on queues instead of sockets.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;
use ryzanstein_process_group::schedule::build::{CollectiveSpec, build};
use ryzanstein_process_group::schedule::cost::{rounds, traffic};
use ryzanstein_process_group::schedule::hazards::hazards;
use ryzanstein_process_group::schedule::program::{Node, Program, Region, Source, Space};
use ryzanstein_process_group::schedule::{Algorithm, Hosts};
use ryzanstein_process_group::{Operation, Rank, ReduceOp};

/// An element is the list of (rank, index) contributions in it, in the order of the reduction: a wrong or doubled one shows.
type Value = Vec<(usize, usize)>;

struct Machine {
    program: Program,
    done: Vec<usize>,

    memory: HashMap<(Space, usize), Value>,
    in_place: bool,
}

impl Machine {
    fn read(&self, region: Region, at: usize) -> Value {
        self.memory.get(&(region.space, region.start + at)).cloned().unwrap_or_default()
    }

    fn write(&mut self, region: Region, at: usize, value: Value) {
        assert!(region.space != Space::Input, "nobody writes the input");
        assert!(!self.in_place || region.space != Space::Input);
        self.memory.insert((region.space, region.start + at), value);
    }
}

fn machines(spec: CollectiveSpec, hosts: &Hosts) -> Vec<Machine> {
    let n = hosts.world_size();
    let machine = |rank| {
        let program = build(spec, rank, hosts);
        let done = vec![0; program.nodes.len()];
        Machine { program, done, memory: initial(spec, rank, n), in_place: spec.in_place }
    };
    (0..n).map(machine).collect()
}

/// The ranks whose messages a node takes.
fn sources(node: &Node) -> Vec<usize> {
    match node {
        Node::Receive { from, .. } => vec![*from],
        Node::Reduce { sources, .. } => {
            sources.iter().filter_map(|s| if let Source::Peer(p) = s { Some(*p) } else { None }).collect()
        }
        Node::Send { .. } => vec![],
    }
}

/// The send at `from` that feeds node `index` of `rank`: messages are matched in order.
fn feeding(ranks: &[Machine], rank: usize, index: usize, from: usize) -> usize {
    let before = ranks[rank].program.nodes[..index].iter().filter(|n| sources(n).contains(&from)).count();
    let sends = ranks[from].program.nodes.iter().enumerate();
    sends.filter(|(_, n)| matches!(n, Node::Send { to, .. } if *to == rank)).nth(before).unwrap().0
}

fn finished(spec: CollectiveSpec, n: usize, ranks: &[Machine]) {
    for (rank, machine) in ranks.iter().enumerate() {
        for (node, done) in machine.program.nodes.iter().zip(&machine.done) {
            assert_eq!(*done, node.region().len(), "rank {rank} is stuck at {node:?} in {spec:?} of {n}");
        }
    }
}

/// Runs all ranks, one element of one node at a time, in an order that `choose` decides, with bounded queues.
fn run(
    spec: CollectiveSpec,
    hosts: &Hosts,
    capacity: usize,
    mut choose: impl FnMut(usize) -> usize,
) -> Vec<Machine> {
    let n = hosts.world_size();
    let mut ranks = machines(spec, hosts);
    let limits: Vec<_> = ranks.iter().map(|m| hazards(&m.program)).collect();
    let mut wires: HashMap<(usize, usize), VecDeque<Value>> = HashMap::new();
    loop {
        let mut able = Vec::new();
        for (rank, machine) in ranks.iter().enumerate() {
            // On each link, messages go and come in program order.
            let (mut sending, mut receiving) = (vec![false; n], vec![false; n]);
            for (index, node) in machine.program.nodes.iter().enumerate() {
                let done = machine.done[index];
                let length = node.region().len();
                if done == length {
                    continue;
                }
                let allowed = limits[rank][index].iter().all(|h| h.limit(machine.done[h.on]) > done);
                let waiting = |from: usize| wires.get(&(from, rank)).is_some_and(|w| !w.is_empty());
                let ready = match node {
                    Node::Send { to, .. } => {
                        let first = !std::mem::replace(&mut sending[*to], true);
                        first && wires.get(&(rank, *to)).is_none_or(|w| w.len() < capacity)
                    }
                    Node::Receive { from, .. } => {
                        !std::mem::replace(&mut receiving[*from], true) && waiting(*from)
                    }
                    Node::Reduce { sources, .. } => {
                        let mut ready = true;
                        for source in sources {
                            if let Source::Peer(from) = source {
                                ready &= !std::mem::replace(&mut receiving[*from], true) && waiting(*from);
                            }
                        }
                        ready
                    }
                };
                if allowed && ready {
                    able.push((rank, index));
                }
            }
        }
        if able.is_empty() {
            break;
        }
        let (rank, index) = able[choose(able.len())];
        step(&mut ranks[rank], rank, index, &mut wires);
    }
    finished(spec, hosts.world_size(), &ranks);
    assert!(wires.values().all(VecDeque::is_empty), "messages that nobody reads");
    ranks
}

fn step(
    machine: &mut Machine,
    rank: usize,
    index: usize,
    wires: &mut HashMap<(usize, usize), VecDeque<Value>>,
) {
    let at = machine.done[index];
    machine.done[index] += 1;
    let mut take = |from: usize| wires.get_mut(&(from, rank)).and_then(VecDeque::pop_front).unwrap();
    match machine.program.nodes[index].clone() {
        Node::Send { to, region } => {
            let value = machine.read(region, at);
            wires.entry((rank, to)).or_default().push_back(value);
        }
        Node::Receive { from, region } => {
            let value = take(from);
            machine.write(region, at, value);
        }
        Node::Reduce { into, sources, .. } => {
            let mut sum = Value::new();
            for source in sources {
                sum.extend(match source {
                    Source::Peer(from) => take(from),
                    Source::Own(region) => machine.read(region, at),
                });
            }
            machine.write(into, at, sum);
        }
    }
}

fn input_space(spec: CollectiveSpec) -> Space {
    if spec.in_place { Space::Output } else { Space::Input }
}

/// Returns a rank's memory before: its own values where the operation reads them.
fn initial(spec: CollectiveSpec, rank: usize, n: usize) -> HashMap<(Space, usize), Value> {
    let CollectiveSpec { operation, count, in_place, .. } = spec;
    let range = match operation {
        Operation::AllGather | Operation::Gather { .. } if in_place => rank * count..(rank + 1) * count,
        Operation::ReduceScatter(_) | Operation::AllToAll => 0..n * count,
        Operation::Scatter { root } if root.index() == rank => 0..n * count,
        Operation::Broadcast { root } if root.index() == rank => 0..count,
        Operation::Scatter { .. } | Operation::Broadcast { .. } => 0..0,
        _ => 0..count,
    };
    range.map(|i| ((input_space(spec), i), vec![(rank, i)])).collect()
}

/// Returns the operands of element `i` of a rank's result, or `None` where it is not a result.
fn expected(spec: CollectiveSpec, rank: usize, n: usize, i: usize) -> Option<Value> {
    let CollectiveSpec { operation, count, in_place, .. } = spec;
    let everybody = |i: usize| (0..n).map(|r| (r, i)).collect::<Value>();
    let at = if in_place { 0 } else { rank * count };
    let mine = if in_place { (rank * count..(rank + 1) * count).contains(&i) } else { i < count };
    match operation {
        Operation::AllReduce(_) | Operation::Barrier => (i < count).then(|| everybody(i)),
        Operation::Broadcast { root } => (i < count).then(|| vec![(root.index(), i)]),
        Operation::Reduce { root, .. } => (i < count && root.index() == rank).then(|| everybody(i)),
        // In place, chunk p of the array is rank p's; out of place each rank passes only its own.
        Operation::AllGather => {
            (i < n * count).then(|| vec![(i / count, if in_place { i } else { i % count })])
        }
        Operation::Gather { root } => (i < n * count && root.index() == rank)
            .then(|| vec![(i / count, if in_place { i } else { i % count })]),
        Operation::ReduceScatter(_) => mine.then(|| everybody(i + at)),
        Operation::Scatter { root } => mine.then(|| vec![(root.index(), i + at)]),
        Operation::AllToAll => (i < n * count).then(|| vec![(i / count, rank * count + i % count)]),
        Operation::Send { .. } | Operation::Recv { .. } => None,
    }
}

fn check(spec: CollectiveSpec, hosts: &Hosts, ranks: &[Machine]) {
    let n = hosts.world_size();
    let mut orders: HashMap<usize, Value> = HashMap::new();
    for (rank, machine) in ranks.iter().enumerate() {
        let sent = traffic(spec, rank, hosts);
        assert_eq!(machine.program.elements_sent(), sent.elements, "elements of rank {rank}, {spec:?}, {n}");
        assert_eq!(machine.program.messages_sent(), sent.messages, "messages of rank {rank}, {spec:?}, {n}");
        assert_eq!(
            machine.program.elements_received(),
            sent.received,
            "received by rank {rank}, {spec:?}, {n}"
        );
        for i in 0..n * spec.count {
            let Some(want) = expected(spec, rank, n, i) else { continue };
            let got = machine.memory.get(&(Space::Output, i)).cloned().unwrap_or_default();
            let mut sorted = got.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, want, "element {i} of rank {rank}, {spec:?}, {n} ranks");
            if let Operation::AllReduce(_) = spec.operation {
                let order = orders.entry(i).or_insert_with(|| got.clone());
                assert_eq!(*order, got, "ranks reduce element {i} in different orders: {spec:?}, {n}");
            }
        }
        if let Operation::Reduce { root, .. } = spec.operation
            && root.index() != rank
            && spec.in_place
        {
            for i in 0..spec.count {
                assert_eq!(machine.read_output(i), vec![(rank, i)], "the others' vectors stay");
            }
        }
    }
}

impl Machine {
    fn read_output(&self, i: usize) -> Value {
        self.memory.get(&(Space::Output, i)).cloned().unwrap_or_default()
    }
}

fn operations(root: Rank) -> Vec<Operation> {
    let op = ReduceOp::Sum;
    vec![
        Operation::AllReduce(op),
        Operation::Broadcast { root },
        Operation::Reduce { op, root },
        Operation::AllGather,
        Operation::ReduceScatter(op),
        Operation::Gather { root },
        Operation::Scatter { root },
        Operation::AllToAll,
        Operation::Barrier,
    ]
}

#[test]
fn every_schedule_is_right_for_every_small_world_and_length() {
    for n in 2..=9 {
        let hosts = &Hosts::one(n);
        for count in [0, 1, 2, 5, 11] {
            for operation in operations(Rank(n as u32 / 2)) {
                for algorithm in Algorithm::ALL.into_iter().filter(|a| a.suits(operation)) {
                    for in_place in [true, false] {
                        let spec = CollectiveSpec { operation, algorithm, count, in_place };
                        check(spec, hosts, &run(spec, hosts, 3, |able| able - 1));
                    }
                }
            }
        }
    }
}

/// By rank: a bit for each rank that it has heard of when its call ends. A message tells what its sender had heard of before.
fn heard(spec: CollectiveSpec, hosts: &Hosts) -> Vec<u32> {
    let ranks = machines(spec, hosts);
    let limits: Vec<_> = ranks.iter().map(|m| hazards(&m.program)).collect();
    let mut known: Vec<Vec<u32>> =
        ranks.iter().enumerate().map(|(rank, m)| vec![1 << rank; m.program.nodes.len()]).collect();
    loop {
        let before = known.clone();
        for (rank, machine) in ranks.iter().enumerate() {
            for (index, node) in machine.program.nodes.iter().enumerate() {
                let waited_for = limits[rank][index].iter().map(|h| before[rank][h.on]);
                let told =
                    sources(node).into_iter().map(|from| before[from][feeding(&ranks, rank, index, from)]);
                known[rank][index] |= waited_for.chain(told).fold(0, |all, some| all | some);
            }
        }
        if known == before {
            return known
                .into_iter()
                .map(|nodes| nodes.into_iter().fold(0, |all, some| all | some))
                .collect();
        }
    }
}

#[test]
fn every_rank_hears_of_every_other_before_its_call_ends() {
    let several = [vec![0, 0, 1, 1], vec![0, 1, 0, 1, 2], vec![0, 0, 0, 1, 2, 2, 1]];
    let groups = (2..=17).map(Hosts::one).chain(several.into_iter().map(Hosts::of));
    for hosts in &groups.collect::<Vec<_>>() {
        let n = hosts.world_size();
        for operation in operations(Rank(n as u32 / 2)) {
            // With no elements, only rooted calls connect every two ranks.
            let counts = if operation.root().is_some() { vec![0, 1, 40] } else { vec![40] };
            for algorithm in Algorithm::ALL.into_iter().filter(|a| a.suits(operation)) {
                for &count in &counts {
                    let spec = CollectiveSpec { operation, algorithm, count, in_place: true };
                    assert_eq!(heard(spec, hosts), vec![(1 << n) - 1; n], "{spec:?} of {n}");
                }
            }
        }
    }
}

/// The longest chain of messages, each of which is sent because of the one before.
fn longest_chain(spec: CollectiveSpec, hosts: &Hosts) -> usize {
    let ranks = machines(spec, hosts);
    let limits: Vec<_> = ranks.iter().map(|m| hazards(&m.program)).collect();
    let mut chains: Vec<Vec<usize>> = ranks.iter().map(|m| vec![0; m.program.nodes.len()]).collect();
    loop {
        let before = chains.clone();
        for (rank, machine) in ranks.iter().enumerate() {
            for (index, node) in machine.program.nodes.iter().enumerate() {
                let waited_for = limits[rank][index].iter().map(|h| before[rank][h.on]);
                let told = sources(node)
                    .into_iter()
                    .map(|from| before[from][feeding(&ranks, rank, index, from)] + 1);
                chains[rank][index] = waited_for.chain(told).max().unwrap_or_default();
            }
        }
        if chains == before {
            return chains.into_iter().flatten().max().unwrap_or_default();
        }
    }
}

/// A world that is no power of two ends some chains one message earlier than the model says.
#[test]
fn rounds_are_the_longest_chain_of_messages_or_one_more() {
    let several = [vec![0, 0, 1, 1], vec![0, 1, 0, 1, 2], vec![0, 0, 0, 1, 2, 2, 1]];
    let groups = (2..=9).map(Hosts::one).chain(several.into_iter().map(Hosts::of));
    for hosts in &groups.collect::<Vec<_>>() {
        let n = hosts.world_size();
        for operation in operations(Rank(n as u32 / 2)) {
            for algorithm in Algorithm::ALL.into_iter().filter(|a| a.suits(operation)) {
                for count in [40, 9000] {
                    let spec = CollectiveSpec { operation, algorithm, count, in_place: true };
                    let (rounds, chain) = (rounds(spec, hosts), longest_chain(spec, hosts));
                    assert!((chain..=chain + 1).contains(&rounds), "{rounds}, {chain}: {spec:?} of {n}");
                }
            }
        }
    }
}

#[test]
fn vectors_too_long_to_be_exchanged_whole_are_right() {
    let operation = Operation::AllReduce(ReduceOp::Sum);
    let several = Hosts::of([0, 1, 2, 0, 1, 0]);
    for (algorithm, hosts) in [(Algorithm::Hierarchical, several), (Algorithm::Direct, Hosts::one(3))] {
        for in_place in [false, true] {
            let spec = CollectiveSpec { operation, algorithm, count: 9000, in_place };
            check(spec, &hosts, &run(spec, &hosts, 1000, |able| able - 1));
        }
    }
}

fn at_random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed | 1;
    move |able| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % able as u64) as usize
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn schedules_are_right_whatever_overlaps_and_however_little_fits_a_wire(
        on in proptest::collection::vec(0..4u8, 2..=16), count in 0..40usize, which in 0..9usize, root in 0..16u32,
        algorithm in prop::sample::select(&Algorithm::ALL[..]), in_place: bool, capacity in 1..5usize, seed: u64,
    ) {
        let (n, hosts) = (on.len(), Hosts::of(on));
        let operation = operations(Rank(root % n as u32))[which];
        prop_assume!(algorithm.suits(operation));
        let spec = CollectiveSpec { operation, algorithm, count, in_place };
        check(spec, &hosts, &run(spec, &hosts, capacity, at_random(seed)));
    }

    #[test]
    fn long_vectors_send_what_the_cost_model_says(
        on in proptest::collection::vec(0..4u8, 2..=16), count in 1000..100_000usize, which in 0..9usize, root in 0..16u32,
        algorithm in prop::sample::select(&Algorithm::ALL[..]),
    ) {
        let (n, hosts) = (on.len(), &Hosts::of(on));
        let operation = operations(Rank(root % n as u32))[which];
        prop_assume!(algorithm.suits(operation));
        let spec = CollectiveSpec { operation, algorithm, count, in_place: true };
        for rank in 0..n {
            let program = build(spec, rank, hosts);
            let sent = traffic(spec, rank, hosts);
            prop_assert_eq!((program.messages_sent(), program.elements_sent()), (sent.messages, sent.elements));
            prop_assert_eq!(program.elements_received(), sent.received);
        }
    }
}
