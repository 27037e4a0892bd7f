//! Ranks that call different things.

use std::time::{Duration, Instant};

use ryzanstein_config::Timeout;
use ryzanstein_process_group::device::DeviceBuffer;
use ryzanstein_process_group::{Error, ProcessGroup, Rank, ReduceOp};
use ryzanstein_tests::gpu::{Ranks, need, role, some_gpus};

use crate::common::{PATIENCE, SOON, initialize, nccl, on_gpus};

/// Ranks call different things; every rank's error must say what rank 1 called.
fn differing(
    name: &str,
    called: &str,
    work: impl Fn(&mut ProcessGroup, &mut DeviceBuffer) -> Result<(), Error>,
) {
    let mut config = nccl();
    // Longer than the test may take: the deadline is not what finds it.
    config.process_group.timeout = Timeout::from_secs(2 * SOON.as_secs());
    if role().is_some() {
        let mut rank = initialize(&config).unwrap();
        let device = rank.manager().world().device().unwrap().clone();
        let mut x = DeviceBuffer::from_slice(&device, &[1.0f32; 1000]).unwrap();
        let started = Instant::now();
        let said = work(rank.manager().world(), &mut x);
        println!("after {:?}: {said:?}", started.elapsed());
        let error = said.and_then(|()| rank.finalize()).expect_err("ranks called different things");
        let said = error.to_string();
        let named = matches!(error.root_cause(), Error::Mismatch { .. } | Error::PeerAborted { .. });
        assert!(named && said.contains("mismatched calls in group `world`"), "{said}");
        let both = format!("rank 1 calls {called}");
        assert!(said.contains("calls all_reduce(sum) of 1000 f32") && said.contains(&both), "{said}");
        return;
    }
    Ranks::start(name, some_gpus()).expect_all(PATIENCE);
}

/// Until there is an error.
fn wait_for_error(group: &mut ProcessGroup) -> Result<(), Error> {
    let until = Instant::now() + SOON;
    while Instant::now() < until {
        group.synchronize()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The twelfth of many calls of rank 1 is `other`.
fn one_of_many(
    group: &mut ProcessGroup,
    x: &mut DeviceBuffer,
    other: impl Fn(&mut ProcessGroup, &mut DeviceBuffer) -> Result<(), Error>,
) -> Result<(), Error> {
    for call in 0..20 {
        if call == 11 && group.rank() == Rank(1) {
            other(group, x)?;
        } else {
            group.all_reduce(x, ReduceOp::Sum)?;
        }
    }
    wait_for_error(group)
}

#[test]
#[ignore = "needs 2 GPUs"]
fn calls_that_wait_for_each_other_are_named() {
    differing(
        "mismatches::calls_that_wait_for_each_other_are_named",
        "broadcast(root 0) of 1000 f32",
        |group, x| one_of_many(group, x, |group, x| group.broadcast(x, Rank(0))),
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn calls_that_differ_and_end_all_the_same_are_named() {
    differing(
        "mismatches::calls_that_differ_and_end_all_the_same_are_named",
        "all_reduce(max) of 1000 f32",
        |group, x| one_of_many(group, x, |group, x| group.all_reduce(x, ReduceOp::Max)),
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn last_calls_that_differ_are_named_before_ranks_leave() {
    let name = "mismatches::last_calls_that_differ_are_named_before_ranks_leave";
    differing(name, "all_reduce(product) of 1000 f32", |group, x| {
        let op = if group.rank() == Rank(1) { ReduceOp::Product } else { ReduceOp::Sum };
        group.all_reduce(x, op)?;
        group.synchronize()
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_has_left_is_named_with_the_call_that_differed() {
    const NAME: &str = "mismatches::a_rank_that_has_left_is_named_with_the_call_that_differed";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        // It waits for nobody, as there is nothing to send.
        let mut nothing = group.upload(&[0u8; 0]).unwrap();
        if me == 1 {
            group.all_reduce(&mut nothing, ReduceOp::Max).unwrap();
            drop(rank);
            println!("has left");
            return;
        }
        std::thread::sleep(Duration::from_secs(3));
        let started = Instant::now();
        let enqueued = group.all_reduce(&mut nothing, ReduceOp::Sum);
        let error = enqueued.and_then(|()| wait_for_error(group)).unwrap_err();
        println!("after {:?}: {error}", started.elapsed());
        assert!(matches!(&error, Error::Mismatch { peer: Rank(1), .. }), "{error}");
        assert!(error.to_string().contains("rank 1 calls all_reduce(max) of 0 u8"), "{error}");
        return;
    }
    need(2);
    Ranks::start(NAME, 2).expect_all(SOON);
}

/// Rank 0 repeats a graph of three calls ten times, the others make single ones, of which `second` gives the second of a pass.
fn a_graph_beside_single_calls(
    group: &mut ProcessGroup,
    x: &mut DeviceBuffer,
    second: impl Fn(usize) -> ReduceOp,
) -> Result<(), Error> {
    let stream = group.device().unwrap().stream().clone();
    let mut pass = |group: &mut ProcessGroup, second: ReduceOp| -> Result<(), Error> {
        group.all_reduce(x, ReduceOp::Sum)?;
        group.all_reduce(x, second)?;
        group.all_reduce(x, ReduceOp::Sum)
    };
    if group.rank() != Rank(0) {
        (0..10).try_for_each(|number| pass(group, second(number)))?;
        return group.synchronize();
    }
    let mut graph = None;
    let recorded = group.capture(|group| {
        #[expect(unsafe_code, reason = "a graph keeps addresses")]
        // SAFETY: buffer and group live until the graph is dropped, at the end.
        let captured = unsafe { stream.capture(|| pass(group, ReduceOp::Sum)) };
        graph = Some(captured?);
        Ok::<_, Error>(())
    })?;
    let graph = graph.unwrap();
    for _ in 0..10 {
        group.replay::<Error>(&recorded, || Ok(graph.launch(&stream)?))?;
    }
    group.synchronize()
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_graph_goes_with_single_calls_of_other_ranks() {
    on_gpus("mismatches::a_graph_goes_with_single_calls_of_other_ranks", 2, &nccl(), |rank| {
        let group = rank.manager().world();
        let device = group.device().unwrap().clone();
        let mut x = DeviceBuffer::from_slice(&device, &[1.0f32; 1000]).unwrap();
        a_graph_beside_single_calls(group, &mut x, |_| ReduceOp::Sum).unwrap();
        assert_eq!(x.to_vec::<f32>(device.stream()).unwrap(), [(1u32 << 30) as f32; 1000]);
        // Both count them alike, and `finalize` compares them.
        group.barrier().unwrap();
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_call_that_differs_from_one_in_a_graph_is_named() {
    let name = "mismatches::a_call_that_differs_from_one_in_a_graph_is_named";
    differing(name, "all_reduce(max) of 1000 f32", |group, x| {
        let is_1 = group.rank() == Rank(1);
        a_graph_beside_single_calls(
            group,
            x,
            |number| {
                if number == 6 && is_1 { ReduceOp::Max } else { ReduceOp::Sum }
            },
        )
    });
}

/// Two tensor-parallel groups of two; in that of ranks 0 and 1 they do `work`, and hear of it from `finalize` alone.
fn in_a_group_of_the_layout(
    name: &str,
    work: impl Fn(&mut ProcessGroup),
    expected: impl Fn(Rank, &str) -> bool,
) {
    let mut config = nccl();
    config.layout.tensor_parallel = Some(2.try_into().unwrap());
    config.layout.data_parallel = 2.try_into().unwrap();
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        if me < 2 {
            work(rank.manager().tensor_parallel());
        }
        match rank.finalize() {
            Ok(()) => assert!(me >= 2, "rank {me} leaves as if nothing were wrong"),
            Err(error) => assert!(me < 2 && expected(Rank(me as u32), &error.to_string()), "{error}"),
        }
        return;
    }
    need(4);
    Ranks::start(name, 4).expect_all(PATIENCE);
}

#[test]
#[ignore = "needs 4 GPUs"]
fn a_mismatch_that_no_call_has_told_of_is_told_when_ranks_leave() {
    let name = "mismatches::a_mismatch_that_no_call_has_told_of_is_told_when_ranks_leave";
    let work = |group: &mut ProcessGroup| {
        let mut x = group.upload(&[1.0f32; 10]).unwrap();
        // So that nobody is still inside NCCL, for its first call, when the difference is found.
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        group.synchronize().unwrap();
        let op = if group.rank() == Rank(1) { ReduceOp::Product } else { ReduceOp::Sum };
        group.all_reduce(&mut x, op).unwrap();
        // The watchers find it, and the group ends, before anybody asks.
        std::thread::sleep(Duration::from_secs(1));
    };
    in_a_group_of_the_layout(name, work, |_, said| {
        said.contains("mismatched calls in group `tensor")
            && said.contains("calls all_reduce(product) of 10 f32")
    });
}

#[test]
#[ignore = "needs 4 GPUs"]
fn a_call_that_only_one_rank_has_made_is_told_when_ranks_leave() {
    let name = "mismatches::a_call_that_only_one_rank_has_made_is_told_when_ranks_leave";
    let work = |group: &mut ProcessGroup| {
        let mut nothing = group.upload(&[0u8; 0]).unwrap();
        if group.rank() == Rank(0) {
            // It waits for nobody, as there is nothing to send.
            group.all_reduce(&mut nothing, ReduceOp::Sum).unwrap();
        }
    };
    in_a_group_of_the_layout(name, work, |_, said| {
        said.contains("left the group without call") && said.contains("all_reduce(sum) of 0 u8")
            || said.contains("they differ in the number of calls")
    });
}
