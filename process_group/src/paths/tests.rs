use proptest::prelude::*;

use super::host::{self, Links, Topology};
use super::tuned::{Machine, Measurement, TunedRange, TuningError, TuningTable};
use super::*;
use crate::membership::roster::tests::members;
use crate::schedule::Algorithm::{Direct, HalvingDoubling, Ring};
use crate::types::operation::ReduceOp;
use crate::types::rank::Rank;

const SUM: Operation = Operation::AllReduce(ReduceOp::Sum);

fn of(world_size: usize, parallel: usize) -> Topology {
    Topology { hosts: Hosts::one(world_size), parallel }
}

#[test]
fn as_many_ranks_move_data_at_once_as_have_cpus() {
    let parallel = |ranks: &[(&str, u32, &str)]| {
        let topology = Topology::of(&members(ranks).iter().collect::<Vec<_>>());
        topology.parallel
    };
    assert_eq!(parallel(&[("a", 2, "0-1"); 4]), 2);
    assert_eq!(parallel(&[("a", 8, "0-7"); 4]), 4);
    assert_eq!(parallel(&[("a", 2, "0-7"); 4]), 2, "a cgroup may allow fewer than the list has");
    assert_eq!(parallel(&[("a", 2, "0-1"), ("b", 2, "0-1"), ("a", 2, "0-1"), ("b", 2, "0-1")]), 4);
    assert_eq!(
        parallel(&[("a", 1, "0"), ("a", 1, "1"), ("a", 1, "2")]),
        3,
        "each is bound to a CPU of its own"
    );
    assert_eq!(parallel(&[("a", 1, "0"), ("a", 3, "1-3"), ("a", 3, "1-3")]), 3);
    assert_eq!(parallel(&[("a", 1, "0"), ("a", 1, "0"), ("a", 1, "1"), ("a", 1, "1")]), 2);
    assert_eq!(parallel(&[("a", 0, ""), ("a", 0, "")]), 1, "nothing is known");
}

/// Returns the table of a group whose links are sockets.
fn table(topology: &Topology, demand: Option<Algorithm>, tuned: &[TunedRange]) -> PathTable {
    host::table(topology, Links::Sockets("it was not asked for"), demand, tuned)
}

/// Returns hosts in which neighbours are on different hosts.
fn hosts_of(world_size: usize, hosts: usize) -> Hosts {
    Hosts::of((0..world_size).map(|rank| rank % hosts))
}

fn operations() -> Vec<Operation> {
    let (op, root, peer) = (ReduceOp::Avg, Rank(1), Rank(1));
    vec![
        SUM,
        Operation::Broadcast { root },
        Operation::Reduce { op, root },
        Operation::AllGather,
        Operation::ReduceScatter(op),
        Operation::Gather { root },
        Operation::Scatter { root },
        Operation::AllToAll,
        Operation::Send { to: peer },
        Operation::Recv { from: peer },
        Operation::Barrier,
    ]
}

/// Checks that there is exactly one path, with a reason.
fn check(table: &PathTable, operation: Operation, dtype: DType, count: usize) -> PathChoice {
    let choice = table.choose(operation, dtype, count);
    assert_eq!(choice.path, table.path(operation, dtype, count), "asking why changes nothing");
    assert!(table.all().contains(&choice.path) && choice.path.suits(operation), "{choice:?}");
    assert!(!choice.reason.is_empty(), "{choice:?}");
    choice
}

/// Returns the description of the calls that take a path.
fn described(table: &PathTable, path: Path) -> String {
    table.describe().into_iter().find(|(described, _)| *described == path).expect("it is there").1
}

fn measured() -> Measurement {
    Measurement {
        date: "2026-11-22".into(),
        bytes: 4096,
        us: 60.0,
        against: Path::Tcp(Ring),
        against_us: 90.0,
    }
}

fn range(world_size: usize, operation: &str, bytes: std::ops::RangeInclusive<u64>, path: Path) -> TunedRange {
    TunedRange {
        world_size,
        operation: operation.into(),
        from_bytes: *bytes.start(),
        to_bytes: *bytes.end(),
        path,
        measured: measured(),
    }
}

/// Returns ranges of one path between each two edges, for each operation that it supports; the bytes are whole numbers of chunks.
fn some_ranges(edges: &[u64], world_size: usize, path: usize) -> Vec<TunedRange> {
    let (path, n) = (Path::Tcp(Algorithm::ALL[path]), world_size as u64);
    let with_it = operations().into_iter().filter(|operation| {
        path.suits(*operation) && !operation.is_point_to_point() && *operation != Operation::Barrier
    });
    let between = |name: &'static str| {
        edges.windows(2).map(move |edge| range(world_size, name, edge[0] / n * n..=edge[1] / n * n, path))
    };
    with_it.flat_map(|operation| between(operation.name())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_call_has_one_path_with_a_reason(
        world_size in 2..64usize, hosts in 1..4usize, parallel in 1..64usize, which in 0..11usize,
        dtype in 0..10usize, count in 0..100_000_000usize, demand in 0..=Algorithm::ALL.len(), forced in 0..=Algorithm::ALL.len(),
        edges in proptest::collection::btree_set(0..400_000_000u64, 0..6), measured in 0..Algorithm::ALL.len(),
    ) {
        let tuned = some_ranges(&edges.into_iter().collect::<Vec<_>>(), world_size, measured);
        let demand = Algorithm::ALL.get(demand).copied();
        let mut table = table(&Topology { hosts: hosts_of(world_size, hosts), parallel }, demand, &tuned);
        let (operation, dtype) = (operations()[which], DType::ALL[dtype]);
        let forced = table.all().get(forced).copied();
        table.force(forced).unwrap();
        let choice = check(&table, operation, dtype, count);
        match (forced, demand.map(Path::Tcp)) {
            (Some(path), _) if path.suits(operation) => prop_assert_eq!(choice.path, path),
            (Some(_), _) => prop_assert!(choice.reason != "it is forced"),
            (None, Some(path)) if path.suits(operation) && table.all().contains(&path) => prop_assert_eq!(choice.path, path),
            (None, _) => {
                let query = Query { operation, dtype, count };
                let parts = if operation.is_chunked() { world_size } else { 1 };
                let whole = (query.bytes() * parts) as u64;
                let range = tuned.iter().find(|range| {
                    range.operation == operation.name() && range.from_bytes <= whole && whole <= range.to_bytes
                });
                let range = range.filter(|range| !query.is_half_reduction() && table.all().contains(&range.path));
                prop_assert_eq!(choice.reason.starts_with("measured by ryz tune on "), range.is_some());
                if let Some(range) = range {
                    prop_assert_eq!(choice.path, range.path);
                }
            }
        }
    }
}

#[test]
fn a_rank_alone_and_backends_with_one_path_have_nothing_to_choose() {
    for operation in operations().into_iter().filter(|operation| !operation.is_point_to_point()) {
        for table in [table(&of(1, 1), Some(Ring), &[]), gpu::nccl_table(1)] {
            assert_eq!(check(&table, operation, DType::F32, 10).path, Path::Local);
        }
        let choice = check(&gpu::nccl_table(4), operation, DType::F32, 10);
        assert_eq!(choice.path, Path::Nccl);
    }
}

#[test]
fn a_group_on_one_host_goes_through_memory_or_sockets_and_tells_the_reason() {
    let shared = host::table(&of(4, 2), Links::SharedMemory, None, &[]);
    for operation in operations() {
        let choice = check(&shared, operation, DType::F32, 1000);
        assert!(matches!(choice.path, Path::SharedMemory(_)), "{choice:?}");
    }
    assert!(described(&shared, Path::Tcp(Direct)).contains("tcp.shared_memory"));
    for ranks in [2, 4, 8, 64] {
        let table = host::table(&of(ranks, 2), Links::SharedMemory, None, &[]);
        let path = |dtype, count| check(&table, Operation::Barrier, dtype, count).path;
        assert_eq!(path(DType::F32, 1), path(DType::U8, 0), "a barrier among {ranks} has no data");
    }
    let sockets = table(&of(4, 2), None, &[]);
    assert_eq!(described(&sockets, Path::SharedMemory(Direct)), "never: it was not asked for");
}

#[test]
fn long_all_reduces_over_hosts_with_several_ranks_are_hierarchical() {
    let topology = Topology { hosts: hosts_of(8, 2), parallel: 8 };
    for links in [Links::SharedWithinHosts, Links::Sockets("they are sockets")] {
        let table = host::table(&topology, links, None, &[]);
        let choice = check(&table, SUM, DType::F32, 1 << 20);
        assert_eq!(choice.path, Path::Tcp(Algorithm::Hierarchical), "{choice:?}");
    }
    let spread = table(&Topology { hosts: hosts_of(4, 4), parallel: 4 }, None, &[]);
    let never = described(&spread, Path::Tcp(Algorithm::Hierarchical));
    assert_eq!(never, "never: each rank has a host of its own");
}

#[test]
fn sixteen_bit_reductions_go_directly_and_others_by_cost() {
    let table = table(&of(8, 2), None, &[]);
    for count in [10, 100_000, 100_000_000] {
        let choice = check(&table, SUM, DType::BF16, count);
        assert_eq!(choice.path, Path::Tcp(Direct));
        assert!(choice.reason.contains("rounded once"));
    }
    let small = check(&table, SUM, DType::F32, 10);
    assert!(small.reason.contains("the cost model expects the least time"), "{}", small.reason);
    assert_eq!(check(&table, Operation::AllToAll, DType::U8, 8).reason, "no other path has all_to_all");
}

#[test]
fn a_path_that_the_group_lacks_cannot_be_forced_and_the_reason_is_told() {
    let mut table = table(&of(4, 4), None, &[]);
    let chosen = check(&table, SUM, DType::F32, 1).path;
    assert_ne!(chosen, Path::Tcp(HalvingDoubling));
    for algorithm in Algorithm::ALL {
        let refused = table.force(Some(Path::SharedMemory(algorithm))).unwrap_err().to_string();
        let expected = format!("no path `shared_memory/{algorithm}`: it was not asked for");
        assert!(refused.contains(&expected), "{refused}");
    }
    assert!(table.force(Some(Path::Nccl)).is_err());
    table.force(Some(Path::Tcp(HalvingDoubling))).unwrap();
    assert_eq!(check(&table, SUM, DType::F32, 1).reason, "it is forced");
    table.force(None).unwrap();
    assert_eq!(check(&table, SUM, DType::F32, 1).path, chosen);
}

#[test]
fn one_more_path_is_one_more_rule() {
    let conditions = [Condition::Operation("all_reduce"), Condition::BytesUpTo(1 << 20)];
    let quick = Rule {
        path: Path::Local,
        when: conditions.to_vec(),
        because: "it is quick for little".into(),
        is_measured: false,
    };
    let rest = Rule::always(Path::Nccl, "it can do everything");
    let table = PathTable::new(8, vec![Path::Local, Path::Nccl], vec![quick, rest], None);
    let choice = check(&table, SUM, DType::F32, 1000);
    assert_eq!((choice.path, choice.reason.as_str()), (Path::Local, "it is quick for little"));
    assert_eq!(check(&table, SUM, DType::F32, 1 << 20).path, Path::Nccl);
    assert_eq!(check(&table, Operation::AllGather, DType::F32, 1).path, Path::Nccl);
    assert_eq!(described(&table, Path::Local), "all_reduce, up to 1 MiB");
    assert_eq!(described(&table, Path::Nccl), "it can do everything");
}

#[test]
fn what_was_measured_comes_before_what_is_built_in() {
    let tuned = [
        range(4, "all_reduce", 1024..=65_535, Path::Tcp(HalvingDoubling)),
        range(4, "all_gather", 4096..=1 << 30, Path::Tcp(Ring)),
        range(3, "broadcast", 1..=1 << 30, Path::Tcp(Ring)),
    ];
    let table = table(&of(4, 2), None, &tuned);
    let inside = check(&table, SUM, DType::F32, 256);
    assert_eq!(inside.path, Path::Tcp(HalvingDoubling));
    assert_eq!(
        inside.reason,
        "measured by ryz tune on 2026-11-22: 60 us against 90 us of tcp/ring, at 4.1 KB"
    );
    for outside in [255, 16_384] {
        let choice = check(&table, SUM, DType::F32, outside);
        assert!(choice.reason.contains("cost model"), "{outside}: {choice:?}");
    }
    // All operands of 16-bit floats still meet at one rank.
    assert!(check(&table, SUM, DType::F16, 1000).reason.contains("rounded once"));
    // The bytes are those of the whole array: 4096 are 256 elements of each of 4 ranks.
    assert_eq!(check(&table, Operation::AllGather, DType::F32, 256).path, Path::Tcp(Ring));
    assert_eq!(check(&table, Operation::AllGather, DType::F32, 1 << 20).path, Path::Tcp(Ring));
    assert!(!check(&table, Operation::AllGather, DType::F32, 255).reason.contains("ryz tune"));
    // This range is for another number of ranks.
    assert!(
        !check(&table, Operation::Broadcast { root: Rank(0) }, DType::F32, 100).reason.contains("ryz tune")
    );
    // The self-check crosses the thresholds of all-reduces only.
    assert!(table.thresholds().contains(&1024) && !table.thresholds().contains(&4096));
    let taken = described(&table, Path::Tcp(HalvingDoubling));
    assert!(
        taken.starts_with("all_reduce, but for reductions of 16-bit floats, from 1 KiB, up to"),
        "{taken}"
    );
    assert!(taken.contains("(measured by ryz tune on 2026-11-22"), "{taken}");
}

#[test]
fn a_measured_path_that_the_group_lacks_leaves_the_call_to_the_built_in_rules() {
    let tuned = [range(4, "all_reduce", 1..=1 << 30, Path::SharedMemory(Ring))];
    let choice = check(&table(&of(4, 2), None, &tuned), SUM, DType::F32, 1000);
    assert!(choice.reason.contains("cost model"), "{choice:?}");
    let tuned = [range(4, "all_reduce", 1..=1 << 30, Path::Tcp(Ring))];
    let demanded = check(&table(&of(4, 2), Some(HalvingDoubling), &tuned), SUM, DType::F32, 1000);
    assert_eq!(demanded.path, Path::Tcp(HalvingDoubling), "what the user demands comes first");
}

#[test]
fn a_table_is_read_as_it_was_written_and_refused_where_it_does_not_fit() {
    let here = Machine { cpu: "a CPU".into(), cpus: 2, gpus: String::new() };
    let mut table = TuningTable::new(here.clone());
    let first = range(2, "all_reduce", 1024..=4095, Path::Tcp(Direct));
    table.replace(2, false, &["all_reduce"], vec![first.clone()]);
    table.replace(4, false, &["broadcast"], vec![range(4, "broadcast", 1..=9, Path::SharedMemory(Ring))]);
    // Other operations and other numbers of ranks stay.
    table.replace(2, false, &["broadcast"], vec![range(2, "broadcast", 7..=9, Path::Tcp(Ring))]);
    let text = table.json();
    let read = TuningTable::parse(&text, &here).expect("it fits");
    assert_eq!(read, table);
    assert_eq!((read.of_world(2).len(), read.of_world(3).len(), read.world_sizes()), (2, 0, vec![2, 4]));
    assert_eq!(read.of_world(2)[0], first);

    let elsewhere = Machine { cpus: 3, ..here.clone() };
    let refused = TuningTable::parse(&text, &elsewhere).unwrap_err();
    assert!(matches!(refused, TuningError::Machine { .. }), "{refused}");
    let refused = |from: &str, to: &str, words: &[&str]| {
        assert!(text.contains(from), "{text}");
        let said = TuningTable::parse(&text.replace(from, to), &here).unwrap_err().to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    };
    refused("\"format\": 2", "\"format\": 1", &["format 1", "measure again"]);
    refused("\"version\": \"", "\"version\": \"9", &["measured with version 9"]);
    refused("tcp/direct", "tcp/tree", &["no table of `ryz tune`", "`tcp/tree` is no path"]);
    refused(
        "\"path\": \"tcp/direct\"",
        "\"path\": \"local\"",
        &["range 1", "`local` is no path of all_reduce"],
    );
    refused("4095", "1023", &["range 1", "ends before"]);
    refused("\"broadcast\"", "\"barrier\"", &["range 2", "`barrier` is no operation"]);
    refused("\"us\": 60.0", "\"us\": -1.0", &["above 0"]);
    refused("\"world_size\": 4", "\"world_size\": 1", &["range 3", "a rank alone"]);
    refused("\"world_size\": 4", "\"world_size\": 2", &["overlaps range 2"]);
    refused("{", "", &["no table"]);
}

#[test]
fn our_own_kernels_take_the_sums_they_have_and_nccl_all_others() {
    for n in 2..=8 {
        let shared = gpu::peer_table(n, None, &[]);
        for operation in operations() {
            for dtype in DType::ALL.iter().copied() {
                for count in [1, 1000, 30_000, 1 << 20, 1 << 28] {
                    let choice = check(&shared, operation, dtype, count);
                    let is_sum = matches!(operation.reduce_op(), None | Some(ReduceOp::Sum));
                    let has = match operation {
                        Operation::AllReduce(_) | Operation::ReduceScatter(_) => is_sum,
                        Operation::AllGather | Operation::Broadcast { .. } => true,
                        _ => false,
                    };
                    let chunks = if operation.is_chunked() { n } else { 1 };
                    let fits = gpu::peer_most(n).is_none_or(|most| chunks * count * dtype.size() <= most);
                    let is_ours = has && fits && gpu::PEER_TYPES.contains(&dtype);
                    assert_eq!(choice.path != Path::Nccl, is_ours, "{n} ranks: {choice:?}");
                }
            }
        }
        let small = check(&shared, SUM, DType::BF16, 500);
        assert_eq!(small.path, Path::PeerMemory(PeerAlgorithm::OneShot));
        let apart = gpu::peer_table(n, Some("no NVLink".into()), &[]);
        assert_eq!(check(&apart, SUM, DType::F32, 500).path, Path::Nccl);
        assert_eq!(described(&apart, small.path), "never: no NVLink");
    }
    let mut forced = gpu::peer_table(2, None, &[]);
    assert!(forced.fuses_add_norm(DType::BF16, 8 * 4096, 4096));
    assert!(!forced.fuses_add_norm(DType::BF16, 8 * 4096 + 1, 4096), "whole rows only");
    assert!(!forced.fuses_add_norm(DType::BF16, 4 * 4095, 4095), "whole vectors only");
    assert!(!forced.fuses_add_norm(DType::F64, 8 * 4096, 4096));
    assert!(!forced.fuses_add_norm(DType::BF16, 4096 * 4096, 4096), "the array is too long");
    assert!(forced.fuses_add_norm(DType::F32, 4096 * 4096, 4096), "f32 has any length");
    assert!(!gpu::nccl_table(2).fuses_add_norm(DType::BF16, 8 * 4096, 4096));
    for path in [Path::Nccl, Path::PeerMemory(PeerAlgorithm::OneShot)] {
        forced.force(Some(path)).unwrap();
        assert_eq!(check(&forced, SUM, DType::F32, 500).path, path);
        assert!(!forced.fuses_add_norm(DType::BF16, 8 * 4096, 4096), "a forced path takes the sum alone");
        for (operation, dtype) in [(SUM, DType::I32), (Operation::AllToAll, DType::F32)] {
            assert_eq!(check(&forced, operation, dtype, 500).path, Path::Nccl);
        }
    }
}

#[test]
fn a_range_for_gpus_comes_before_the_built_in_rules_there_and_nowhere_else() {
    let [one_shot, two_shot] = PeerAlgorithm::ALL.map(Path::PeerMemory);
    let all = [
        range(2, "all_reduce", 1000..=3999, Path::Nccl),
        range(2, "all_reduce", 4000..=9999, two_shot),
        range(2, "all_gather", 4000..=9999, Path::Nccl),
        range(2, "all_reduce", 1000..=9999, Path::Tcp(Algorithm::Ring)),
    ];
    let table = gpu::peer_table(2, None, &all);
    let path = |operation, dtype, count| check(&table, operation, dtype, count).path;
    assert_eq!(path(SUM, DType::BF16, 1000), Path::Nccl);
    assert_eq!(path(SUM, DType::F32, 1000), two_shot);
    assert_eq!(path(SUM, DType::I32, 1500), Path::Nccl, "it has no other path");
    assert_eq!(path(SUM, DType::BF16, 100), one_shot);
    assert_eq!(path(Operation::AllGather, DType::BF16, 1500), Path::Nccl, "6000 bytes of all ranks");
    assert!(!table.fuses_add_norm(DType::BF16, 1024, 1024), "what NCCL is measured to be quicker at");
    assert!(check(&table, SUM, DType::BF16, 1000).reason.contains("measured by ryz tune"));
    // The same table, for a group on host memory and for one that shares no memory.
    let apart = gpu::peer_table(2, Some("no NVLink".into()), &all);
    assert_eq!(check(&apart, SUM, DType::BF16, 3000).path, Path::Nccl);
    let machine = Machine { cpu: "a CPU".into(), cpus: 2, gpus: "2 × a GPU, driver 1".into() };
    let mut file = TuningTable::new(machine.clone());
    file.replace(2, true, &["all_reduce", "all_gather"], all[..3].to_vec());
    file.replace(2, false, &["all_reduce"], all[3..].to_vec());
    let read = TuningTable::parse(&file.json(), &machine).unwrap();
    assert_eq!(read.of_world(2).len(), 4, "those on CPUs and on GPUs do not overlap");
    let without = Machine { gpus: String::new(), ..machine };
    let error = TuningTable::parse(&file.json(), &without).unwrap_err().to_string();
    assert!(error.contains("2 × a CPU, 2 × a GPU, driver 1"), "{error}");
}

const BEGIN: &str =
    "<!-- The test `the_page_on_paths_has_the_limits_of_the_code` writes the following lines. -->\n";
const END: &str = "<!-- End of the lines of the test. -->\n";

/// Up to which size a path carries an operation among `n` GPUs, if no rule before it carries every size.
fn limit(path: Path, operation: &'static str, n: usize) -> Option<String> {
    let table = gpu::peer_table(n, None, &[]);
    for rule in table.rules.iter().filter(|rule| rule.when.contains(&Condition::Operation(operation))) {
        let most = rule.when.iter().find_map(|condition| match condition {
            Condition::BytesUpTo(most) => Some(*most),
            _ => None,
        });
        // All ranks' chunks together; a chunk is a whole number of bytes.
        let chunks = if ["all_gather", "reduce_scatter"].contains(&operation) { n } else { 1 };
        let most = most.map(|most| rule::bytes((most * chunks).next_multiple_of(1 << 10)));
        if rule.path == path {
            return Some(most.map_or("any length".to_owned(), |most| format!("≤ {most}")));
        }
        most?;
    }
    None
}

/// The calls that our own kernels carry, by number of ranks, as the page on paths has them.
fn limits_page() -> String {
    let worlds: Vec<usize> = gpu::PEER_RANKS.collect();
    let rows: Vec<_> = ["all_reduce", "broadcast", "all_gather", "reduce_scatter"]
        .into_iter()
        .flat_map(|operation| PeerAlgorithm::ALL.map(|kernel| (Path::PeerMemory(kernel), operation)))
        .map(|(path, operation)| {
            (path, operation, worlds.iter().map(|n| limit(path, operation, *n)).collect())
        })
        .filter(|(.., limits): &(_, _, Vec<Option<String>>)| limits.iter().any(Option::is_some))
        .collect();
    // Numbers of ranks with the same limits are one column.
    let same = |a: &usize, b: &usize| rows.iter().all(|(.., limits)| limits[*a] == limits[*b]);
    let indices: Vec<usize> = (0..worlds.len()).collect();
    let columns: Vec<(usize, usize)> = indices.chunk_by(same).map(|of| (of[0], of[of.len() - 1])).collect();
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let titles = columns.iter().map(|(first, last)| match (worlds[*first], worlds[*last]) {
        (first, last) if first == last => format!("{first} ranks"),
        (first, last) => format!("{first} to {last} ranks"),
    });
    let mut page = line(["path", "operation"].map(str::to_owned).into_iter().chain(titles).collect());
    page += &line(vec!["---".to_owned(); 2 + columns.len()]);
    for (path, operation, limits) in &rows {
        let cells = columns.iter().map(|(first, _)| limits[*first].clone().unwrap_or("–".to_owned()));
        page += &line([format!("`{path}`"), format!("`{operation}`")].into_iter().chain(cells).collect());
    }
    let mib = |n: &usize| gpu::shared_bytes(*n).div_ceil(1 << 20);
    page + &format!(
        "\nThe element types are {}. Sizes are those of all ranks' chunks together. Each rank shares {} MiB of its\nmemory for 2 \
         ranks, at most {} MiB for more.\n",
        gpu::PEER_TYPES.map(DType::name).join(", "),
        mib(&worlds[0]),
        worlds[1..].iter().map(mib).max().unwrap_or_default(),
    )
}

#[test]
fn the_page_on_paths_has_the_limits_of_the_code() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/paths.md");
    let page = std::fs::read_to_string(file).expect("the page on paths");
    let (head, rest) = page.split_once(BEGIN).expect("the page marks where the limits begin");
    let (_, tail) = rest.split_once(END).expect("the page marks where the limits end");
    let current = format!("{head}{BEGIN}\n{}\n{END}{tail}", limits_page());
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(file, &current).expect("the page can be written");
        return;
    }
    assert!(
        page == current,
        "docs/src/paths.md is not what the table of paths says; run `UPDATE=1 cargo test -p ryzanstein-process-group --lib \
         page_on_paths` and commit the result"
    );
}
