//! Ranks that are killed, stop, or never call.

use std::time::{Duration, Instant};

use ryzanstein_config::Timeout;
use ryzanstein_process_group::device::DeviceBuffer;
use ryzanstein_process_group::{Error, ProcessGroup, Rank, ReduceOp};
use ryzanstein_tests::gpu::{Ranks, memory_used, need, role, some_gpus, wait_for_memory};

use crate::common::{PATIENCE, SOON, initialize, nccl, on_gpus, sum_of_ranks};

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_killed_in_a_collective_is_named_by_the_others() {
    const NAME: &str = "lost::a_rank_killed_in_a_collective_is_named_by_the_others";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let group = rank.manager().world();
        let mut x = group.upload(&vec![1.0f32; 1 << 22]).unwrap();
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
    on_gpus(
        "lost::a_group_that_a_rank_does_not_make_ends_at_the_deadline_and_names_it",
        2,
        &config,
        |rank| {
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
        },
    );
}

#[test]
#[ignore = "needs 3 GPUs"]
fn a_rank_that_gives_up_connecting_a_group_tells_those_it_has_reached() {
    const NAME: &str = "lost::a_rank_that_gives_up_connecting_a_group_tells_those_it_has_reached";
    let mut config = nccl();
    // Rank 0 gives up before rank 2 comes, and rank 1 does not.
    config.process_group.timeout = Timeout::from_secs(if role() == Some(0) { 3 } else { 8 });
    on_gpus(NAME, 3, &config, |rank| {
        let manager = rank.manager();
        let me = manager.rank();
        if me.0 == 2 {
            std::thread::sleep(Duration::from_secs(5));
        }
        let error = manager.new_group(&[Rank(0), Rank(1), Rank(2)]).unwrap_err();
        println!("{error}");
        if me.0 == 0 {
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(2)]), "{error}");
        } else if me.0 == 1 {
            let told = matches!(error, Error::PeerAborted { rank: Rank(0), .. });
            assert!(told && error.to_string().contains("connecting group"), "{error}");
        }
        // The world goes on.
        manager.world().set_timeout(SOON);
        sum_of_ranks(manager.world(), me);
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_whose_gpu_lacks_room_for_a_new_group_tells_the_others() {
    const NAME: &str = "lost::a_rank_whose_gpu_lacks_room_for_a_new_group_tells_the_others";
    let mut config = nccl();
    if let Some(me) = role() {
        if me == 1 {
            // Not a byte.
            config.device.memory_fraction = "1e-15".parse().unwrap();
        }
        let error = initialize(&config).map(drop).unwrap_err();
        println!("{error}");
        assert!(error.to_string().contains("over the budget"), "{error}");
        assert!(me == 1 || matches!(error, Error::PeerAborted { rank: Rank(1), .. }), "{error}");
        return;
    }
    need(2);
    Ranks::start(NAME, 2).expect_all(PATIENCE);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_killed_while_a_group_is_made_is_named() {
    const NAME: &str = "lost::a_rank_killed_while_a_group_is_made_is_named";
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
    signalled_while_nccl_starts("lost::a_rank_killed_while_nccl_starts_is_named", "-KILL", lost);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_stops_while_nccl_starts_holds_up_nobody_beyond_the_deadline() {
    let name = "lost::a_rank_that_stops_while_nccl_starts_holds_up_nobody_beyond_the_deadline";
    // A rank is unresponsive after four seconds of five; a slow machine may come to the deadline first.
    signalled_while_nccl_starts(name, "-STOP", |error| {
        matches!(error, Error::Timeout { .. } | Error::PeerUnresponsive { rank: Rank(1), .. })
    });
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
    let name = "lost::a_caller_whom_nccl_holds_for_a_connection_comes_out_at_the_deadline";
    beside_a_silent_rank(name, |group, x| {
        group.all_to_all(x).and_then(|()| group.synchronize()).unwrap_err()
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_caller_whom_a_full_gpu_holds_comes_out_at_the_deadline() {
    let name = "lost::a_caller_whom_a_full_gpu_holds_comes_out_at_the_deadline";
    beside_a_silent_rank(name, |group, x| {
        // More than a GPU takes.
        (0..5000).find_map(|_| group.all_reduce(x, ReduceOp::Sum).err()).expect("an error")
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_never_calls_is_named_at_the_deadline() {
    const NAME: &str = "lost::a_rank_that_never_calls_is_named_at_the_deadline";
    let mut config = nccl();
    config.process_group.timeout = Timeout::from_secs(2);
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        let group = rank.manager().world();
        let mut x = group.upload(&[1.0f32; 1000]).unwrap();
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
