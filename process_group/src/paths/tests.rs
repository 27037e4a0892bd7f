use proptest::prelude::*;

use super::host::{CROSS_MEMORY_FROM, RING_FROM, Topology, table};
use super::*;
use crate::operation::ReduceOp;
use crate::rank::Rank;
use crate::schedule::Algorithm::{Direct, HalvingDoubling, RecursiveDoubling, Ring};

const SUM: Operation = Operation::AllReduce(ReduceOp::Sum);

fn of(world_size: usize, parallel: usize) -> Topology {
    Topology { hosts: Hosts::one(world_size), parallel }
}

/// Neighbours are on different hosts.
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

/// Exactly one path, and a reason for every other that the group has or might have had.
fn check(table: &PathTable, operation: Operation, dtype: DType, count: usize) -> PathChoice {
    let choice = table.choose(operation, dtype, count);
    assert_eq!(choice.path, table.path(operation, dtype, count), "asking why changes nothing");
    assert!(table.all().contains(&choice.path) && choice.path.suits(operation), "{choice:?}");
    let mut told: Vec<Path> = choice.rejected.iter().map(|(path, _)| *path).collect();
    told.push(choice.path);
    told.sort_unstable();
    let mut known: Vec<Path> = table.describe().into_iter().map(|(path, _)| path).collect();
    known.sort_unstable();
    assert_eq!(told, known, "{choice:?}");
    let reasons = choice.rejected.iter().map(|(_, why)| why).chain([&choice.reason]);
    assert!(reasons.into_iter().all(|why| !why.is_empty()), "{choice:?}");
    choice
}

fn why_not(choice: &PathChoice, path: Path) -> &str {
    &choice.rejected.iter().find(|(other, _)| *other == path).expect("it is rejected").1
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_call_has_one_path_and_every_other_a_reason(
        world_size in 2..64usize, hosts in 1..4usize, parallel in 1..64usize, cross_memory: bool, which in 0..11usize,
        dtype in 0..10usize, count in 0..100_000_000usize, demand in 0..6usize, forced in 0..7usize,
    ) {
        let demand = Algorithm::ALL.get(demand).copied();
        let mut table = table(&Topology { hosts: hosts_of(world_size, hosts), parallel }, cross_memory, demand);
        let (operation, dtype) = (operations()[which], DType::ALL[dtype]);
        let forced = table.all().get(forced).copied();
        table.force(forced).unwrap();
        let choice = check(&table, operation, dtype, count);
        match (forced, demand.map(Path::Tcp)) {
            (Some(path), _) if path.suits(operation) => prop_assert_eq!(choice.path, path),
            (Some(path), _) => prop_assert!(why_not(&choice, path).contains("it is forced, but it has no")),
            (None, Some(path)) if path.suits(operation) && table.all().contains(&path) => prop_assert_eq!(choice.path, path),
            (None, Some(_)) => prop_assert!(choice.path != Path::CrossMemory, "a demand is one for links"),
            (None, None) => {}
        }
    }
}

#[test]
fn a_rank_alone_and_backends_with_one_path_have_nothing_to_choose() {
    for operation in operations().into_iter().filter(|operation| !operation.is_point_to_point()) {
        for table in [table(&of(1, 1), false, Some(Ring)), gpu::nccl_table(1)] {
            assert_eq!(check(&table, operation, DType::F32, 10).path, Path::Local);
        }
        let choice = check(&gpu::nccl_table(4), operation, DType::F32, 10);
        assert_eq!((choice.path, choice.rejected.len()), (Path::Nccl, 0));
    }
}

#[test]
fn large_chunks_are_read_from_memory_where_that_can_be_done() {
    let n = 4;
    let count = CROSS_MEMORY_FROM / 4 * n;
    let can = table(&of(n, 2), true, None);
    assert_eq!(check(&can, SUM, DType::F32, count).path, Path::CrossMemory);
    let shorter = check(&can, SUM, DType::F32, count - n);
    assert_eq!(why_not(&shorter, Path::CrossMemory), "131068 B a rank are less than 128 KiB");
    // A chunked operation counts one rank's chunk, whatever the number of ranks.
    assert_eq!(check(&can, Operation::AllGather, DType::F32, count / n).path, Path::CrossMemory);
    assert_eq!(
        why_not(&check(&can, Operation::Barrier, DType::U8, 0), Path::CrossMemory),
        "it has no barrier"
    );

    let cannot = check(&table(&of(n, 2), false, None), SUM, DType::F32, count);
    assert!(why_not(&cannot, Path::CrossMemory).contains("process_group.tcp.cross_memory"));
    let spread =
        check(&table(&Topology { hosts: hosts_of(n, 2), parallel: 2 }, false, None), SUM, DType::F32, count);
    assert_eq!(why_not(&spread, Path::CrossMemory), "the ranks are on several hosts");
    let demanded = check(&table(&of(n, 2), true, Some(Ring)), Operation::AllToAll, DType::F32, count);
    assert_eq!(demanded.path, Path::Tcp(Direct));
    assert_eq!(
        why_not(&demanded, Path::CrossMemory),
        "process_group.tcp.algorithm demands an algorithm over links"
    );
}

#[test]
fn long_all_reduces_of_three_ranks_and_more_go_round_the_ring() {
    let count = RING_FROM / 4;
    for (n, count, is_ring) in [(3, count, true), (8, count, true), (3, count - 1, false), (2, count, false)]
    {
        let choice = check(&table(&of(n, 1), false, None), SUM, DType::F32, count);
        let by_rule = choice.reason.contains("least is in flight");
        assert_eq!(by_rule, is_ring, "{n} ranks, {count} elements: {choice:?}");
        assert!(!is_ring || choice.path == Path::Tcp(Ring));
    }
}

#[test]
fn sixteen_bit_reductions_go_directly_and_others_by_cost() {
    let table = table(&of(8, 2), false, None);
    for count in [10, 100_000, 100_000_000] {
        let choice = check(&table, SUM, DType::BF16, count);
        assert_eq!(choice.path, Path::Tcp(Direct));
        assert!(choice.reason.contains("rounded once"));
        assert!(why_not(&choice, Path::Tcp(HalvingDoubling)).contains("`tcp/direct` comes first"));
    }
    let small = check(&table, SUM, DType::F32, 10);
    assert_eq!(small.path, Path::Tcp(RecursiveDoubling));
    assert!(small.reason.contains("the cost model expects the least time"), "{}", small.reason);
    assert!(why_not(&small, Path::Tcp(Ring)).starts_with("the cost model expects "));
    assert_eq!(check(&table, Operation::Barrier, DType::U8, 0).reason, "no other path has barrier");
    assert_eq!(
        why_not(&check(&table, Operation::AllToAll, DType::F32, 9), Path::Tcp(Ring)),
        "it has no all_to_all"
    );
}

#[test]
fn a_path_that_the_group_lacks_cannot_be_forced_and_the_reason_is_told() {
    let mut table = table(&of(4, 4), false, None);
    let chosen = check(&table, SUM, DType::F32, 1).path;
    assert_ne!(chosen, Path::Tcp(HalvingDoubling));
    let refused = table.force(Some(Path::CrossMemory)).unwrap_err().to_string();
    assert!(refused.contains("no path `cross_memory`: not every rank may read"), "{refused}");
    assert!(table.force(Some(Path::Nccl)).is_err());
    table.force(Some(Path::Tcp(HalvingDoubling))).unwrap();
    assert_eq!(check(&table, SUM, DType::F32, 1).reason, "it is forced");
    table.force(None).unwrap();
    assert_eq!(check(&table, SUM, DType::F32, 1).path, chosen);
}

#[test]
fn one_more_path_is_one_more_rule() {
    let conditions = [Condition::AllReduce, Condition::RanksUpTo(8), Condition::BytesUpTo(1 << 20)];
    let quick = Rule { path: Path::Loopback, when: conditions.to_vec(), because: "it is quick for little" };
    let otherwise = Otherwise::Always { path: Path::Nccl, because: "it can do everything" };
    let new = |ranks| PathTable::new(ranks, vec![Path::Loopback, Path::Nccl], vec![quick.clone()], otherwise);
    let choice = check(&new(8), SUM, DType::F32, 1000);
    assert_eq!((choice.path, choice.reason.as_str()), (Path::Loopback, "it is quick for little"));
    assert_eq!(why_not(&choice, Path::Nccl), "`loopback` comes first: it is quick for little");
    let unmet = |ranks, operation, count| {
        why_not(&check(&new(ranks), operation, DType::F32, count), Path::Loopback).to_owned()
    };
    assert_eq!(unmet(9, SUM, 1000), "9 ranks, and it is preferred up to 8");
    assert_eq!(unmet(8, SUM, 1 << 20), "4 MiB are more than 1 MiB");
    assert_eq!(unmet(8, Operation::AllGather, 1), "preferred for all_reduce only, not for all_gather");
    let described = new(8).describe();
    assert_eq!(described[0].1, "all_reduce, up to 8 ranks, up to 1 MiB");
    assert_eq!(described[1].1, "it can do everything");
}
