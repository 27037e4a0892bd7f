//! Ranks that leave.

use std::time::{Duration, Instant};

use ryzanstein_config::Timeout;
use ryzanstein_process_group::device::Launch;
use ryzanstein_process_group::{Error, ProcessGroup, Rank, ReduceOp};
use ryzanstein_tests::gpu::{Ranks, need, role};

use crate::common::{SOON, initialize, nccl};

/// Rank 0 enqueues an all-reduce and leaves at once; the others come to it long after.
fn in_the_middle(name: &str, ranks: usize, op: ReduceOp) {
    let mut config = nccl();
    config.process_group.timeout = Timeout::from_secs(2 * SOON.as_secs());
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        let mut x = rank.manager().world().upload(&[1.0f32; 1000]).unwrap();
        if me == 1 {
            // When rank 0 has gone, whose part of the call has been cut off: what is there is nothing to go on with.
            std::thread::sleep(Duration::from_secs(15));
        }
        let group = rank.manager().world();
        let started = Instant::now();
        let enqueued = group.all_reduce(&mut x, op);
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
    need(ranks);
    Ranks::start(name, ranks).expect_all(SOON);
}

#[test]
#[ignore = "needs 3 GPUs"]
fn a_rank_that_leaves_in_the_middle_of_a_call_ends_and_is_named() {
    const NAME: &str = "leaving::a_rank_that_leaves_in_the_middle_of_a_call_ends_and_is_named";
    in_the_middle(NAME, 3, ReduceOp::Max);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_in_the_middle_of_a_call_of_our_own_kernels_ends_and_is_named() {
    const NAME: &str =
        "leaving::a_rank_that_leaves_in_the_middle_of_a_call_of_our_own_kernels_ends_and_is_named";
    in_the_middle(NAME, 2, ReduceOp::Sum);
}

/// Rank 1 makes `its` calls and leaves; `work` of rank 0 has one more, and must tell how rank 1 has left it.
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
        assert!(named && error.to_string().contains(&format!("it has left the group {what}")), "{error}");
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
        let mut x = group.upload(&[1.0f32; 1000])?;
        (0..calls).try_for_each(|_| group.all_reduce(&mut x, ReduceOp::Max))?;
        group.synchronize()
    };
    let name = "leaving::a_rank_that_leaves_before_the_last_of_many_calls_is_named";
    without_its_part(name, true, "without call", |group| some(group, 19).unwrap(), |group| some(group, 20));
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_before_a_call_that_connects_to_it_is_named() {
    let name = "leaving::a_rank_that_leaves_before_a_call_that_connects_to_it_is_named";
    // Without the check, connections are made in the first calls.
    without_its_part(
        name,
        false,
        "without call",
        |_| {},
        |group| {
            let mut x = group.upload(&[1.0f32; 1000])?;
            group.all_to_all(&mut x).and_then(|()| group.synchronize())
        },
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_before_the_last_of_many_graphs_with_messages_is_named() {
    let name = "leaving::a_rank_that_leaves_before_the_last_of_many_graphs_with_messages_is_named";
    let exchange = |group: &mut ProcessGroup, times: usize| -> Result<(), Error> {
        let other = Rank(1 - group.rank().0);
        let (mine, mut theirs) = (group.upload(&[1.0f32; 1000])?, group.upload(&[0.0f32; 1000])?);
        let stream = group.device().unwrap().stream().clone();
        let mut graph = None;
        let recorded = group.capture(|group| {
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
        "without sending message 20 to this rank",
        |group| exchange(group, 19).unwrap(),
        |group| exchange(group, 20),
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_short_message_that_is_never_received_is_not_missed() {
    const NAME: &str = "leaving::a_short_message_that_is_never_received_is_not_missed";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        let mut x = group.upload(&[1.0f32; 1000]).unwrap();
        let work = long_work(group);
        // So closely one after the other that only a mark behind the long work tells whether the message has been taken.
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        if me == 0 {
            group.send(&x, Rank(1)).unwrap();
            work();
            std::thread::sleep(LONG_GONE + LONG_GONE / 4);
            assert!(group.failure().is_none(), "{:?}", group.failure());
            group.synchronize().unwrap();
        } else {
            // Until the message is there: the memory that it goes to must not be gone before.
            std::thread::sleep(LONG_GONE / 4);
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
    const NAME: &str = "leaving::a_message_of_a_rank_that_has_left_is_not_missed";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        let mut x = group.upload(&[me as f32; 1000]).unwrap();
        if me == 0 {
            // That nobody receives it is no reason to miss the other.
            group.send(&x, Rank(1)).unwrap();
        }
        group.barrier().unwrap();
        if me == 1 {
            group.send(&x, Rank(0)).unwrap();
            group.synchronize().unwrap();
        } else {
            long_work(group)();
            let started = Instant::now();
            group.recv(&mut x, Rank(1)).unwrap();
            group.synchronize().unwrap();
            println!("done after {:?}", started.elapsed());
            assert!(started.elapsed() > LONG_GONE, "nothing was waited for");
            assert_eq!(group.download(&x).unwrap(), [1.0; 1000]);
        }
        // Not `finalize`, which would wait for the others.
        drop(rank);
        return;
    }
    need(2);
    Ranks::start(NAME, 2).expect_all(SOON);
}

/// Time after which everybody has heard that a rank has left.
const LONG_GONE: Duration = Duration::from_secs(2);

/// Work for a GPU, to be enqueued: twice as long, so that a rank whose call stands behind it seems to wait for somebody.
fn long_work(group: &ProcessGroup) -> impl Fn() + use<> {
    const SPIN: &str = r#"extern "C" __global__ void spin(unsigned long long nanoseconds) {
        unsigned long long begin, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < nanoseconds);
    }"#;
    let device = group.device().unwrap().clone();
    let spin = device.kernels().module("spin", SPIN, &[]).unwrap().kernel("spin").unwrap();
    #[expect(unsafe_code, reason = "a kernel is launched")]
    // SAFETY: the kernel declares this one number, and touches no memory.
    move || unsafe { spin.launch(device.stream(), Launch::new(1, 1), &[&4_000_000_000u64]) }.unwrap()
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_when_its_part_is_done_is_not_missed() {
    const NAME: &str = "leaving::a_rank_that_leaves_when_its_part_is_done_is_not_missed";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        let mut x = group.upload(&[me as f32; 1000]).unwrap();
        // Connections are there.
        group.broadcast(&mut x, Rank(0)).unwrap();
        group.synchronize().unwrap();
        x.write(&[me as f32; 1000]).unwrap();
        if me == 0 {
            long_work(group)();
        }
        let started = Instant::now();
        group.broadcast(&mut x, Rank(1)).unwrap();
        group.synchronize().unwrap();
        println!("done after {:?}", started.elapsed());
        assert_eq!(group.download(&x).unwrap(), [1.0; 1000]);
        // Not `finalize`, which would wait for the others.
        drop(rank);
        return;
    }
    need(2);
    Ranks::start(NAME, 2).expect_all(SOON);
}
