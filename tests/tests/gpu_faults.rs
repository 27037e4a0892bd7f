//! NCCL when ranks are killed, stop, leave, or call different things: one process a rank and one GPU a process. All ignored:
//! `cargo test -p ryzanstein-tests --test gpu_faults -- --ignored --test-threads=1` on a machine with GPUs, NCCL and NVRTC.

mod common;

use std::time::{Duration, Instant};

use common::{PATIENCE, SOON, initialize, nccl, on_gpus, sum_of_ranks};
use ryzanstein_config::Timeout;
use ryzanstein_process_group::device::{DeviceBuffer, Launch};
use ryzanstein_process_group::{Error, ProcessGroup, Rank, ReduceOp};
use ryzanstein_tests::gpu::{Ranks, memory_used, need, role, some_gpus, wait_for_memory};

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_killed_in_a_collective_is_named_by_the_others() {
    const NAME: &str = "a_rank_killed_in_a_collective_is_named_by_the_others";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        let mut x = group.place(&vec![1.0f32; 1 << 22]).unwrap();
        println!("ready");
        if me == 1 {
            // Killed here, with the others inside a collective.
            std::thread::sleep(PATIENCE);
        }
        let error = loop {
            let outcome = group.all_reduce(&mut x, ReduceOp::Max).and_then(|()| group.synchronize());
            if let Err(error) = outcome {
                break error;
            }
        };
        assert!(error.to_string().contains("lost rank 1"), "{error}");
        let again = group.all_reduce(&mut x, ReduceOp::Max).unwrap_err();
        assert!(matches!(again, Error::Poisoned(_)), "{again}");
        // Memory is given back, the context works.
        let device = group.device().unwrap().clone();
        drop(x);
        assert_eq!(
            DeviceBuffer::from_slice(&device, &[7u8]).unwrap().to_vec::<u8>(device.stream()).unwrap(),
            [7]
        );
        println!("named it");
        return;
    }
    let (n, before) = (some_gpus(), memory_used());
    let mut ranks = Ranks::start(NAME, n);
    for rank in 0..n {
        ranks.wait_for(rank, "ready", PATIENCE);
    }
    std::thread::sleep(Duration::from_millis(500));
    let killed = Instant::now();
    ranks.kill(1);
    for rank in (0..n).filter(|r| *r != 1) {
        ranks.wait_for(rank, "named it", SOON);
    }
    println!("named by all {} others {:?} after it was killed", n - 1, killed.elapsed());
    for rank in (0..n).filter(|r| *r != 1) {
        ranks.expect_success(rank, PATIENCE);
    }
    println!("all have ended {:?} after", killed.elapsed());
    wait_for_memory(before, SOON);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_group_that_a_rank_does_not_make_ends_at_the_deadline_and_names_it() {
    let mut config = nccl();
    config.process_group.timeout = Timeout::from_secs(5);
    on_gpus("a_group_that_a_rank_does_not_make_ends_at_the_deadline_and_names_it", 2, &config, |rank| {
        let manager = rank.manager();
        if manager.rank().0 == 0 {
            // One waits for the other's id, the other for somebody to come with it.
            for ranks in [[1, 0], [0, 1]] {
                let error = manager.new_group(&ranks.map(Rank)).unwrap_err();
                println!("{error}");
                assert!(error.to_string().contains("rank 1 is not there"), "{error}");
            }
        } else {
            std::thread::sleep(Duration::from_secs(12));
        }
        // The others' groups go on.
        let me = manager.rank();
        manager.world().set_timeout(SOON);
        sum_of_ranks(manager.world(), me);
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_killed_while_a_group_is_made_is_named() {
    const NAME: &str = "a_rank_killed_while_a_group_is_made_is_named";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        println!("ready");
        if me == 1 {
            std::thread::sleep(PATIENCE);
        }
        let error = rank.manager().new_group(&[Rank(0), Rank(1)]).unwrap_err();
        assert!(error.to_string().contains("lost rank 1"), "{error}");
        println!("named it");
        return;
    }
    need(2);
    let before = memory_used();
    let mut ranks = Ranks::start(NAME, 2);
    for rank in 0..2 {
        ranks.wait_for(rank, "ready", PATIENCE);
    }
    std::thread::sleep(Duration::from_secs(1));
    let killed = Instant::now();
    ranks.kill(1);
    ranks.wait_for(0, "named it", SOON);
    println!("named {:?} after it was killed", killed.elapsed());
    ranks.expect_success(0, PATIENCE);
    wait_for_memory(before, SOON);
}

/// Rank 1 gets this signal while NCCL makes a communicator of both; rank 0 is told what error it gets.
fn signalled_while_nccl_starts(name: &str, signal: &'static str, expected: impl Fn(&Error) -> bool) {
    let mut config = nccl();
    config.process_group.timeout = Timeout::from_secs(5);
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        if me == 1 {
            // A communicator takes several times as long, and connections a few milliseconds.
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                let me = std::process::id().to_string();
                std::process::Command::new("kill").args([signal, &me]).status().unwrap();
            });
        }
        let started = Instant::now();
        let error = rank.manager().new_group(&[Rank(0), Rank(1)]).unwrap_err();
        println!("after {:?}: {error}", started.elapsed());
        assert!(expected(&error), "{error}");
        return;
    }
    need(2);
    let before = memory_used();
    Ranks::start(name, 2).expect_success(0, SOON);
    wait_for_memory(before, SOON);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_killed_while_nccl_starts_is_named() {
    let lost = |error: &Error| error.to_string().contains("lost rank 1");
    signalled_while_nccl_starts("a_rank_killed_while_nccl_starts_is_named", "-KILL", lost);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_stops_while_nccl_starts_holds_up_nobody_beyond_the_deadline() {
    let name = "a_rank_that_stops_while_nccl_starts_holds_up_nobody_beyond_the_deadline";
    signalled_while_nccl_starts(name, "-STOP", |error| matches!(error, Error::Timeout { .. }));
}

/// Rank 1 is there and does nothing while rank 0 does `work`, whose error must name it in time.
fn beside_a_silent_rank(name: &str, work: impl Fn(&mut ProcessGroup, &mut DeviceBuffer) -> Error) {
    let mut config = nccl();
    config.process_group.timeout = Timeout::from_secs(3);
    // Connections are then made in the first calls.
    config.process_group.self_check = false;
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        let group = rank.manager().world();
        let device = group.device().unwrap().clone();
        let mut x = DeviceBuffer::from_slice(&device, &[1.0f32; 1000]).unwrap();
        if me == 1 {
            std::thread::sleep(Duration::from_secs(10));
            return;
        }
        let started = Instant::now();
        let error = work(group, &mut x);
        println!("after {:?}: {error}", started.elapsed());
        assert!(error.to_string().ends_with("rank 1 is not there"), "{error}");
        return;
    }
    need(2);
    Ranks::start(name, 2).expect_success(0, SOON);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_caller_whom_nccl_holds_for_a_connection_comes_out_at_the_deadline() {
    let name = "a_caller_whom_nccl_holds_for_a_connection_comes_out_at_the_deadline";
    beside_a_silent_rank(name, |group, x| {
        group.all_to_all(x).and_then(|()| group.synchronize()).unwrap_err()
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_caller_whom_a_full_gpu_holds_comes_out_at_the_deadline() {
    let name = "a_caller_whom_a_full_gpu_holds_comes_out_at_the_deadline";
    beside_a_silent_rank(name, |group, x| {
        // More than a GPU takes.
        (0..5000).find_map(|_| group.all_reduce(x, ReduceOp::Sum).err()).expect("an error")
    });
}

#[test]
#[ignore = "needs 3 GPUs"]
fn a_rank_that_leaves_in_the_middle_of_a_call_ends_and_is_named() {
    const NAME: &str = "a_rank_that_leaves_in_the_middle_of_a_call_ends_and_is_named";
    let mut config = nccl();
    config.process_group.timeout = Timeout::from_secs(2 * SOON.as_secs());
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        let mut x = rank.manager().world().place(&[1.0f32; 1000]).unwrap();
        if me == 1 {
            // When rank 0 has gone, whose part of the call has been cut off: what is there is nothing to go on with.
            std::thread::sleep(Duration::from_secs(12));
        }
        let group = rank.manager().world();
        let started = Instant::now();
        let enqueued = group.all_reduce(&mut x, ReduceOp::Max);
        if me != 0 {
            let error = enqueued.and_then(|()| group.synchronize()).unwrap_err();
            println!("after {:?}: {error}", started.elapsed());
            assert!(error.to_string().contains("rank 0 aborted: "), "{error}");
            assert!(error.to_string().contains("leaves the group in the middle of a call"), "{error}");
            return;
        }
        enqueued.unwrap();
        // It waits for nothing, and leaves.
        // The groups first: freeing the buffer waits for the GPU.
        drop(rank);
        drop(x);
        return;
    }
    need(3);
    Ranks::start(NAME, 3).expect_all(SOON);
}

/// Rank 1 makes `its` calls and leaves; `work` of rank 0 has one more, and must tell without `what` rank 1 has left.
fn without_its_part(
    name: &str,
    self_check: bool,
    what: &str,
    its: impl Fn(&mut ProcessGroup),
    work: impl Fn(&mut ProcessGroup) -> Result<(), Error>,
) {
    let mut config = nccl();
    // Longer than the test may take: the deadline is not what finds it.
    config.process_group.timeout = Timeout::from_secs(2 * SOON.as_secs());
    config.process_group.self_check = self_check;
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        let group = rank.manager().world();
        if me == 1 {
            its(group);
            // Not `finalize`, whose barrier would be a call too.
            drop(rank);
            return;
        }
        let started = Instant::now();
        let error = work(group).unwrap_err();
        println!("after {:?}: {error}", started.elapsed());
        let named = matches!(error.root_cause(), Error::PeerLost { rank: Rank(1), .. });
        assert!(
            named && error.to_string().contains(&format!("it has left the group without {what}")),
            "{error}"
        );
        return;
    }
    need(2);
    Ranks::start(name, 2).expect_success(0, SOON);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_before_the_last_of_many_calls_is_named() {
    // In quick succession, so that the last has no mark of its own.
    let some = |group: &mut ProcessGroup, calls: usize| {
        let mut x = group.place(&[1.0f32; 1000])?;
        (0..calls).try_for_each(|_| group.all_reduce(&mut x, ReduceOp::Max))?;
        group.synchronize()
    };
    let name = "a_rank_that_leaves_before_the_last_of_many_calls_is_named";
    without_its_part(name, true, "call", |group| some(group, 19).unwrap(), |group| some(group, 20));
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_before_a_call_that_connects_to_it_is_named() {
    let name = "a_rank_that_leaves_before_a_call_that_connects_to_it_is_named";
    // Without the check, connections are made in the first calls.
    without_its_part(
        name,
        false,
        "call",
        |_| {},
        |group| {
            let mut x = group.place(&[1.0f32; 1000])?;
            group.all_to_all(&mut x).and_then(|()| group.synchronize())
        },
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_before_the_last_of_many_messages_is_named() {
    let name = "a_rank_that_leaves_before_the_last_of_many_messages_is_named";
    without_its_part(
        name,
        true,
        "sending message 20 to this rank",
        |group| {
            let x = group.place(&[1.0f32; 1000]).unwrap();
            (0..19).try_for_each(|_| group.send(&x, Rank(0))).unwrap();
            group.synchronize().unwrap();
        },
        |group| {
            let mut x = group.place(&[1.0f32; 1000])?;
            (0..20).try_for_each(|_| group.recv(&mut x, Rank(1)))?;
            group.synchronize()
        },
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_without_a_message_to_it_is_named() {
    let name = "a_rank_that_leaves_without_a_message_to_it_is_named";
    without_its_part(
        name,
        true,
        "receiving message 1 from this rank",
        |_| {},
        |group| {
            // More than NCCL keeps for a receiver that has not come.
            let x = group.place(&vec![1.0f32; 64 << 20])?;
            group.send(&x, Rank(1))?;
            group.synchronize()
        },
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_behind_a_message_of_another_length_is_named() {
    let name = "a_rank_that_leaves_behind_a_message_of_another_length_is_named";
    without_its_part(
        name,
        true,
        "after it has sent this rank 4000 bytes in 1 messages",
        |group| {
            let x = group.place(&[1.0f32; 1000]).unwrap();
            group.send(&x, Rank(0)).unwrap();
            group.synchronize().unwrap();
        },
        |group| {
            let mut x = group.place(&vec![1.0f32; 64 << 20])?;
            group.recv(&mut x, Rank(1))?;
            group.synchronize()
        },
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_before_the_last_of_many_graphs_with_messages_is_named() {
    let name = "a_rank_that_leaves_before_the_last_of_many_graphs_with_messages_is_named";
    let exchange = |group: &mut ProcessGroup, times: usize| -> Result<(), Error> {
        let other = Rank(1 - group.rank().0);
        let (mine, mut theirs) = (group.place(&[1.0f32; 1000])?, group.place(&[0.0f32; 1000])?);
        let stream = group.device().unwrap().stream().clone();
        let mut graph = None;
        let recorded = group.record(|group| {
            #[expect(unsafe_code, reason = "a graph keeps addresses")]
            // SAFETY: buffers and group live until the graph is dropped, at the end.
            let captured = unsafe { stream.capture(|| group.send_recv(&mine, other, &mut theirs, other)) };
            graph = Some(captured?);
            Ok::<_, Error>(())
        })?;
        let graph = graph.unwrap();
        for _ in 0..times {
            group.replay::<Error>(&recorded, || Ok(graph.launch(&stream)?))?;
        }
        group.synchronize()
    };
    without_its_part(
        name,
        true,
        "sending message 20 to this rank",
        |group| exchange(group, 19).unwrap(),
        |group| exchange(group, 20),
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_short_message_that_is_never_received_is_not_missed() {
    const NAME: &str = "a_short_message_that_is_never_received_is_not_missed";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        if me == 0 {
            let x = group.place(&[1.0f32; 1000]).unwrap();
            group.send(&x, Rank(1)).unwrap();
        }
        // Behind the message: NCCL has taken it.
        group.barrier().unwrap();
        if me == 0 {
            std::thread::sleep(LONG_GONE);
            assert!(group.failure().is_none(), "{:?}", group.failure());
            group.synchronize().unwrap();
        }
        // Not `finalize`, which would wait for the others.
        drop(rank);
        return;
    }
    need(2);
    Ranks::start(NAME, 2).expect_all(SOON);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_message_of_a_rank_that_has_left_is_not_missed() {
    const NAME: &str = "a_message_of_a_rank_that_has_left_is_not_missed";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        let mut x = group.place(&[me as f32; 1000]).unwrap();
        if me == 1 {
            group.send(&x, Rank(0)).unwrap();
            group.synchronize().unwrap();
        } else {
            compute_for_long(group);
            let started = Instant::now();
            group.recv(&mut x, Rank(1)).unwrap();
            group.synchronize().unwrap();
            println!("done after {:?}", started.elapsed());
            assert!(started.elapsed() > LONG_GONE, "nothing was waited for");
            assert_eq!(group.fetch(&x).unwrap(), [1.0; 1000]);
        }
        // Not `finalize`, which would wait for the others.
        drop(rank);
        return;
    }
    need(2);
    Ranks::start(NAME, 2).expect_all(SOON);
}

/// How long after a rank has left nobody can but have heard of it.
const LONG_GONE: Duration = Duration::from_secs(2);

/// Twice as long: a rank whose call stands behind it seems to wait for somebody.
fn compute_for_long(group: &ProcessGroup) {
    const SPIN: &str = r#"extern "C" __global__ void spin(unsigned long long nanoseconds) {
        unsigned long long begin, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < nanoseconds);
    }"#;
    let device = group.device().unwrap();
    let spin = device.kernels().module("spin", SPIN, &[]).unwrap().kernel("spin").unwrap();
    #[expect(unsafe_code, reason = "a kernel is launched")]
    // SAFETY: the kernel declares this one number, and touches no memory.
    unsafe { spin.launch(device.stream(), Launch::new(1, 1), &[&4_000_000_000u64]) }.unwrap();
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_when_its_part_is_done_is_not_missed() {
    const NAME: &str = "a_rank_that_leaves_when_its_part_is_done_is_not_missed";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        let mut x = group.place(&[me as f32; 1000]).unwrap();
        // Connections are there.
        group.broadcast(&mut x, Rank(0)).unwrap();
        group.synchronize().unwrap();
        x.write(&[me as f32; 1000]).unwrap();
        if me == 0 {
            compute_for_long(group);
        }
        let started = Instant::now();
        group.broadcast(&mut x, Rank(1)).unwrap();
        group.synchronize().unwrap();
        println!("done after {:?}", started.elapsed());
        assert_eq!(group.fetch(&x).unwrap(), [1.0; 1000]);
        // Not `finalize`, which would wait for the others.
        drop(rank);
        return;
    }
    need(2);
    Ranks::start(NAME, 2).expect_all(SOON);
}

#[test]
#[ignore = "needs 3 GPUs"]
fn a_rank_that_has_left_is_not_missed_by_messages_between_others() {
    const NAME: &str = "a_rank_that_has_left_is_not_missed_by_messages_between_others";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        if me != 2 {
            let (mine, mut theirs) =
                (group.place(&[me as f32; 1000]).unwrap(), group.place(&[9f32; 1000]).unwrap());
            compute_for_long(group);
            let other = Rank(1 - me as u32);
            let started = Instant::now();
            // Two messages in one: no single rank is waited for by call.
            group.send_recv(&mine, other, &mut theirs, other).unwrap();
            group.synchronize().unwrap();
            println!("done after {:?}", started.elapsed());
            assert!(started.elapsed() > LONG_GONE, "nothing was waited for");
            assert_eq!(group.fetch(&theirs).unwrap(), [other.0 as f32; 1000]);
        }
        // Not `finalize`, which would wait for the others.
        drop(rank);
        return;
    }
    need(3);
    Ranks::start(NAME, 3).expect_all(SOON);
}

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
    differing("calls_that_wait_for_each_other_are_named", "broadcast(root 0) of 1000 f32", |group, x| {
        one_of_many(group, x, |group, x| group.broadcast(x, Rank(0)))
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn calls_that_differ_and_end_all_the_same_are_named() {
    differing(
        "calls_that_differ_and_end_all_the_same_are_named",
        "all_reduce(max) of 1000 f32",
        |group, x| one_of_many(group, x, |group, x| group.all_reduce(x, ReduceOp::Max)),
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn last_calls_that_differ_are_named_before_ranks_leave() {
    let name = "last_calls_that_differ_are_named_before_ranks_leave";
    differing(name, "all_reduce(product) of 1000 f32", |group, x| {
        let op = if group.rank() == Rank(1) { ReduceOp::Product } else { ReduceOp::Sum };
        group.all_reduce(x, op)?;
        group.synchronize()
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_has_left_is_named_with_the_call_that_differed() {
    const NAME: &str = "a_rank_that_has_left_is_named_with_the_call_that_differed";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        // It waits for nobody, as there is nothing to send.
        let mut nothing = group.place(&[0u8; 0]).unwrap();
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
    let recorded = group.record(|group| {
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
    on_gpus("a_graph_goes_with_single_calls_of_other_ranks", 2, &nccl(), |rank| {
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
    let name = "a_call_that_differs_from_one_in_a_graph_is_named";
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

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_never_calls_is_named_at_the_deadline() {
    const NAME: &str = "a_rank_that_never_calls_is_named_at_the_deadline";
    let mut config = nccl();
    config.process_group.timeout = Timeout::from_secs(2);
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        let group = rank.manager().world();
        let mut x = group.place(&[1.0f32; 1000]).unwrap();
        if me == 1 {
            std::thread::sleep(Duration::from_secs(8));
            let error = group.all_reduce(&mut x, ReduceOp::Sum).unwrap_err();
            assert!(error.to_string().contains("rank 1 is not there"), "{error}");
            return;
        }
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        let error = group.synchronize().unwrap_err();
        let known = matches!(&error, Error::Timeout { .. } | Error::PeerAborted { .. });
        assert!(known && error.to_string().ends_with("rank 1 is not there"), "{error}");
        return;
    }
    Ranks::start(NAME, some_gpus()).expect_all(PATIENCE);
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
    let name = "a_mismatch_that_no_call_has_told_of_is_told_when_ranks_leave";
    let work = |group: &mut ProcessGroup| {
        let mut x = group.place(&[1.0f32; 10]).unwrap();
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
    let name = "a_call_that_only_one_rank_has_made_is_told_when_ranks_leave";
    let work = |group: &mut ProcessGroup| {
        let mut nothing = group.place(&[0u8; 0]).unwrap();
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
