//! Wrong calls, absent ranks and lost ranks: what the others are told.

use std::time::{Duration, Instant};

use ryzanstein_config::{BackendChoice, Config, Timeout};
use ryzanstein_process_group::{
    Error, MemoryRendezvous, ProcessGroup, ProcessGroupManager, Rank, ReduceOp, Result,
};
use ryzanstein_tests::{SOON, config, encrypted, in_good_order, sockets, try_ranks, with_ranks};

/// Ranks make the calls that `call` gives each; all must fail, none with a result, and say what `words` says.
fn mismatch(n: usize, words: &[&str], call: impl Fn(&mut ProcessGroup) -> Result<()> + Sync) {
    for config in [config(BackendChoice::Tcp), encrypted(), sockets()] {
        let errors = with_ranks(&config, n, |mut manager| {
            let group = manager.world();
            let started = Instant::now();
            let error = call(group).expect_err("a mismatched call gives no result");
            assert!(started.elapsed() < SOON, "told in time, not at the deadline");
            // The group stays unusable, and says why.
            let again = group.barrier().expect_err("the group is poisoned");
            assert!(matches!(again, Error::Poisoned(_)), "{again}");
            error.to_string()
        });
        for error in &errors {
            for word in words {
                assert!(error.contains(word), "`{word}` is not in: {error}");
            }
        }
    }
}

#[test]
fn another_operation_is_an_error_on_every_rank() {
    mismatch(3, &["all_reduce(sum) of 10 f32", "all_gather", "they differ in operation"], |group| {
        let mut x = [1.0f32; 30];
        if group.rank().0 == 1 {
            group.all_gather(&mut x)
        } else {
            group.all_reduce(&mut x[..10], ReduceOp::Sum)
        }
    });
}

#[test]
fn another_length_is_an_error_on_every_rank() {
    mismatch(4, &["of 1000 f32", "of 999 f32", "they differ in length"], |group| {
        let length = if group.rank().0 == 2 { 999 } else { 1000 };
        group.all_reduce(&mut vec![1.0f32; length], ReduceOp::Sum)
    });
}

#[test]
fn another_length_of_a_long_vector_is_an_error_on_every_rank() {
    mismatch(4, &["they differ in length"], |group| {
        let length = if group.rank().0 == 2 { 3 << 20 } else { 4 << 20 };
        group.all_reduce(&mut vec![1.0f32; length], ReduceOp::Sum)
    });
}

#[test]
fn a_short_and_a_long_vector_meet_in_an_error_though_they_travel_differently() {
    mismatch(3, &["of 100 f32", "of 4194304 f32", "they differ in length"], |group| {
        let length = if group.rank().0 == 2 { 100 } else { 4 << 20 };
        group.all_reduce(&mut vec![1.0f32; length], ReduceOp::Sum)
    });
}

#[test]
fn a_message_of_another_length_or_type_is_said_to_differ_in_that() {
    with_ranks(&config(BackendChoice::Tcp), 2, |mut manager| {
        let group = manager.world();
        if group.rank().0 == 0 {
            // Who sends a short message has left the call before anybody can object, and learns of it with its next one.
            group.send(&[1.0f32; 4], Rank(1)).unwrap();
            group.barrier().unwrap_err();
        } else {
            let error = group.recv(&mut [0.0f32; 5], Rank(0)).unwrap_err().to_string();
            let words = ["rank 1 calls recv(from 0) of 5 f32", "rank 0 calls send(to 1) of 4 f32"];
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
            assert!(error.contains("they differ in length"), "{error}");
        }
        manager.store_barrier("heard", SOON).unwrap();
    });
    with_ranks(&config(BackendChoice::Tcp), 2, |mut manager| {
        let group = manager.world();
        if group.rank().0 == 0 {
            group.send(&[1.0f32; 4], Rank(1)).unwrap();
        } else {
            let error = group.recv(&mut [0i32; 4], Rank(0)).unwrap_err().to_string();
            assert!(error.contains("they differ in element type"), "{error}");
        }
        manager.store_barrier("heard", SOON).unwrap();
    });
}

#[test]
fn a_rank_that_panics_is_said_to_have_panicked() {
    let errors = with_ranks(&config(BackendChoice::Tcp), 3, |mut manager| {
        if manager.rank().0 == 1 {
            let panicked = std::thread::scope(|scope| {
                let rank = scope.spawn(move || {
                    let _manager = manager;
                    panic!("on purpose");
                });
                rank.join().is_err()
            });
            assert!(panicked);
            return None;
        }
        Some(manager.world().barrier().unwrap_err())
    });
    for error in errors.iter().flatten() {
        assert!(
            matches!(error, Error::PeerAborted { rank: Rank(1), reason } if reason.contains("the program panicked")),
            "{error}"
        );
    }
}

#[test]
fn a_panic_beside_an_asynchronous_call_is_told_before_its_deadline() {
    let errors = with_ranks(&config(BackendChoice::Tcp), 2, |mut manager| {
        if manager.rank().0 == 1 {
            // It waits for a message of rank 0, which waits for one of this rank.
            let waiting = manager.world().recv_async(vec![0u8; 8], Rank(0)).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            let told = Instant::now();
            manager.panicked("on purpose");
            assert!(told.elapsed() < SOON, "it waited for the deadline of the call");
            assert!(waiting.wait().unwrap_err().to_string().contains("on purpose"));
            return None;
        }
        Some(manager.world().recv(&mut [0u8; 8], Rank(1)).unwrap_err())
    });
    let error = errors[0].as_ref().unwrap().to_string();
    assert!(error.contains("rank 1 aborted: the program panicked: on purpose"), "{error}");
}

#[test]
fn a_rank_may_leave_as_soon_as_its_own_call_is_done() {
    // The start-up check ends with calls whose payloads are read from their senders' memory.
    for _ in 0..20 {
        try_ranks(&config(BackendChoice::Tcp), 3, |manager| drop(manager.unwrap()));
    }
}

#[test]
fn what_is_read_from_a_rank_that_gives_up_never_ends_in_a_result() {
    const LENGTH: usize = 3 << 20;
    let outcomes = with_ranks(&config(BackendChoice::Tcp), 3, |mut manager| {
        let everybody: Vec<Rank> = Rank::all(3).collect();
        let mut results = Vec::new();
        for millis in [1, 2, 3, 4, 6, 8, 12, 16] {
            let mut group = manager.new_group(&everybody).unwrap().unwrap();
            let gives_up = group.rank().0 == 1;
            let mut x = vec![1.0f32; LENGTH];
            let barrier = group.barrier();
            if gives_up {
                group.set_timeout(Duration::from_millis(millis));
            }
            // Who is slow out of the barrier may find there that the other has given up.
            let result = barrier.and_then(|()| group.all_reduce(&mut x, ReduceOp::Sum));
            if gives_up && result.is_err() {
                // Others that still read it now get wrong values.
                x.fill(-1000.0);
            }
            if result.is_ok() {
                assert!(
                    x.iter().all(|v| *v == 3.0),
                    "a result with another's rubbish in it, after {millis} ms"
                );
            }
            results.push(result.is_ok());
            drop(x);
            manager.store_barrier(&format!("round-{millis}"), SOON).unwrap();
        }
        results
    });
    assert!(outcomes.iter().flatten().any(|ok| !ok), "no deadline was short enough to try anything");
}

#[test]
fn another_element_type_is_an_error_on_every_rank() {
    mismatch(2, &["of 8 i32", "of 8 f32", "they differ in element type"], |group| {
        if group.rank().0 == 1 {
            group.all_reduce(&mut [1i32; 8], ReduceOp::Sum)
        } else {
            group.all_reduce(&mut [1.0f32; 8], ReduceOp::Sum)
        }
    });
}

#[test]
fn another_reduction_is_an_error_on_every_rank() {
    mismatch(3, &["all_reduce(max)", "all_reduce(sum)", "they differ in reduction"], |group| {
        let op = if group.rank().0 == 0 { ReduceOp::Max } else { ReduceOp::Sum };
        group.all_reduce(&mut [1.0f32; 8], op)
    });
}

/// Tries all ways, or about 30 of very many, in which ranks may name different roots, by every rooted operation and on every path: each rank
/// is told both calls, who made them, and that they differ in the root, by the call itself: also a rank that only sends.
fn another_root(n: u32, count: usize) {
    // Rank `r` names `roots[r]`; all naming one is no mistake.
    let all = n.pow(n);
    let some: Vec<Vec<u32>> = (0..all)
        .step_by((all / 30).max(1) as usize)
        .map(|code| (0..n).map(|r| code / n.pow(r) % n).collect::<Vec<_>>())
        .filter(|roots| roots.iter().any(|root| *root != roots[0]))
        .collect();
    let paths = with_ranks(&config(BackendChoice::Tcp), n as usize, |mut m| m.world().paths()).remove(0);
    for (case, roots) in some.iter().enumerate() {
        // Two ranks see every combination; in larger worlds the paths take turns.
        let taken = if n == 2 { paths.clone() } else { vec![paths[case % paths.len()]] };
        for (path, what) in taken.into_iter().flat_map(|path| (0..4).map(move |what| (path, what))) {
            let errors = with_ranks(&config(BackendChoice::Tcp), n as usize, |mut manager| {
                let group = manager.world();
                group.force_path(Some(path)).unwrap();
                let root = Rank(roots[group.rank().index()]);
                let started = Instant::now();
                let mut x = vec![1.0f32; count * n as usize];
                let outcome = match what {
                    0 => group.broadcast(&mut x[..count], root),
                    1 => group.reduce(&mut x[..count], ReduceOp::Sum, root),
                    2 => group.gather(&mut x, root),
                    _ => group.scatter(&mut x, root),
                };
                let error = outcome.expect_err("roots differ");
                assert!(started.elapsed() < SOON, "told in time, not at the deadline");
                error.to_string()
            });
            let operation = ["broadcast", "reduce", "gather", "scatter"][what];
            for error in &errors {
                let shown = format!("{path} {operation} {roots:?}: {error}");
                assert!(error.contains("they differ in root"), "{shown}");
                assert_eq!(error.matches(&format!("calls {operation}(")).count(), 2, "{shown}");
                let named: Vec<u32> = roots_of(error);
                assert!(named.len() == 2 && named[0] != named[1], "{shown}");
                let ranks: Vec<u32> = callers_of(error);
                assert_eq!(ranks.iter().map(|r| roots[*r as usize]).collect::<Vec<_>>(), named, "{shown}");
            }
        }
    }
}

/// The numbers that follow each `word` in a text.
fn numbers_after(text: &str, word: &str) -> Vec<u32> {
    let digits = |rest: &str| rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    text.match_indices(word).filter_map(|(at, _)| digits(&text[at + word.len()..])).collect()
}

fn roots_of(error: &str) -> Vec<u32> {
    numbers_after(error, "root ")
}

/// Who called, of `rank 1 calls …, rank 2 calls …`.
fn callers_of(error: &str) -> Vec<u32> {
    let callers = error.match_indices(" calls ").filter_map(|(at, _)| error[..at].rsplit("rank ").next());
    callers.filter_map(|rank| rank.parse().ok()).collect()
}

#[test]
fn another_root_is_an_error_on_both_of_two_ranks() {
    another_root(2, 8);
}

#[test]
fn another_root_is_an_error_on_each_of_three_ranks() {
    another_root(3, 8);
}

#[test]
fn another_root_is_an_error_on_each_of_five_ranks() {
    another_root(5, 8);
}

#[test]
fn another_root_of_a_long_vector_is_an_error_on_every_rank() {
    another_root(2, 1 << 20);
}

#[test]
fn wrong_arguments_are_refused_before_anything_is_sent() {
    in_good_order(&config(BackendChoice::Tcp), 3, |manager| {
        let group = manager.world();
        let refused = |result: Result<()>, words: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{error:?}");
            assert!(error.to_string().contains(words), "`{words}` is not in: {error}");
        };
        refused(
            group.broadcast(&mut [0u8; 3], Rank(3)),
            "rank 3 is not in group `world`, whose ranks are 0 to 2",
        );
        refused(group.all_gather(&mut [0u8; 4]), "4 elements do not divide by 3");
        refused(group.all_gather_into(&[0u8; 4], &mut [0u8; 11]), "11 elements do not divide by 3");
        refused(group.all_reduce_into(&[0u8; 4], &mut [0i8; 4], ReduceOp::Sum), "the same type");
        refused(group.send(&[0u8], group.rank()), "cannot exchange messages with itself");
        // The group is as good as before.
        let mut x = [1u8];
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, [3]);
    });
}

#[test]
fn an_exchange_that_is_refused_takes_no_number() {
    in_good_order(&config(BackendChoice::Tcp), 2, |manager| {
        let group = manager.world();
        let (me, other) = (group.rank(), Rank(1 - group.rank().0));
        let mut got = [0u32];
        for from in [me, Rank(2)] {
            let error = group.send_recv(&[1u32], other, &mut got, from).unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{error}");
        }
        if me.0 == 0 {
            group.send_recv(&[7u32], other, &mut got, other).unwrap();
        } else {
            group.send(&[7u32], other).unwrap();
            group.recv(&mut got, other).unwrap();
        }
        assert_eq!(got, [7]);
    });
}

#[test]
fn a_rank_that_never_calls_is_named_by_all_others() {
    for length in [10, 4 << 20] {
        let outcomes = with_ranks(&config(BackendChoice::Tcp), 4, |mut manager| {
            let group = manager.world();
            group.set_timeout(Duration::from_millis(700));
            if group.rank().0 == 2 {
                std::thread::sleep(Duration::from_secs(4));
                return None;
            }
            Some(group.all_reduce(&mut vec![1.0f32; length], ReduceOp::Sum).unwrap_err())
        });
        for error in outcomes.into_iter().flatten() {
            // From its own deadline, or from the rank whose deadline came first.
            let known = matches!(&error, Error::Timeout { .. } | Error::PeerAborted { .. });
            assert!(known && error.to_string().ends_with("rank 2 is not there"), "{length}: {error}");
        }
    }
}

#[test]
fn a_member_that_does_not_make_the_group_is_named() {
    let mut config = config(BackendChoice::Tcp);
    config.process_group.timeout = Timeout::from_millis(700);
    with_ranks(&config, 2, |mut manager| {
        if manager.rank().0 == 1 {
            let error = manager.new_group(&[Rank(0), Rank(1)]).unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(0)]), "{error}");
        }
        manager.store_barrier("the group was not made", SOON).unwrap();
    });
}

#[test]
fn ranks_with_different_layouts_are_named_with_them() {
    std::thread::scope(|scope| {
        for (me, rendezvous) in MemoryRendezvous::new(4).into_iter().enumerate() {
            scope.spawn(move || {
                let mut config = config(BackendChoice::Tcp);
                config.layout.data_parallel = if me == 2 { 2 } else { 1 }.try_into().unwrap();
                let error = ProcessGroupManager::initialize(&config, &rendezvous).unwrap_err().to_string();
                let (ours, theirs) = if me == 2 { (2, 4) } else { (4, 2) };
                let says = |who: usize, layout: usize| {
                    error.contains(&format!("rank {who} has the layout tensor_parallel {layout}"))
                        || error.contains(&format!("rank {who} has tensor_parallel {layout}"))
                };
                let other = if me == 2 { 0 } else { 2 };
                assert!(says(me, ours) && says(other, theirs), "rank {me}: {error}");
            });
        }
    });
}

#[test]
fn a_rank_that_leaves_is_named_at_once() {
    let outcomes = with_ranks(&config(BackendChoice::Tcp), 4, |mut manager| {
        let group = manager.world();
        group.barrier().unwrap();
        if group.rank().0 == 1 {
            return None;
        }
        let started = Instant::now();
        let error = loop {
            if let Err(error) = group.all_reduce(&mut vec![1.0f32; 1 << 20], ReduceOp::Sum) {
                break error;
            }
        };
        assert!(started.elapsed() < SOON);
        Some(error.to_string())
    });
    for error in outcomes.into_iter().flatten() {
        assert!(error.contains("lost rank 1"), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_join_is_named() {
    let mut config = config(BackendChoice::Tcp);
    config.rendezvous.timeout = Timeout::from_millis(300);
    let ranks = MemoryRendezvous::new(3);
    std::thread::scope(|scope| {
        for rendezvous in ranks.into_iter().take(2) {
            let config = &config;
            scope.spawn(move || {
                let error = ProcessGroupManager::initialize(config, &rendezvous).unwrap_err().to_string();
                assert!(
                    error.contains("joining timed out") && error.contains("rank 2 is not there"),
                    "{error}"
                );
            });
        }
    });
}

#[test]
fn nccl_is_refused_with_the_reason_on_every_rank() {
    let mut config = config(BackendChoice::Nccl);
    // So it is on a machine with GPUs too.
    config.device.nccl = Some("/nonexistent/libnccl.so.2".into());
    config.device.cuda = Some("/nonexistent/libcuda.so.1".into());
    for outcome in try_ranks(&config, 2, |manager| manager.map(drop)) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("not `nccl`: no rank can use it") && error.contains("not found"), "{error}");
    }
}

#[test]
fn ranks_that_want_different_backends_are_told_who_wants_what() {
    std::thread::scope(|scope| {
        for (i, rendezvous) in MemoryRendezvous::new(2).into_iter().enumerate() {
            scope.spawn(move || {
                let config = config(if i == 0 { BackendChoice::Tcp } else { BackendChoice::Auto });
                let error = ProcessGroupManager::initialize(&config, &rendezvous).unwrap_err().to_string();
                assert!(error.contains("rank 0 wants `tcp`, rank 1 wants `auto`"), "{error}");
            });
        }
    });
}

#[test]
fn an_interface_that_is_not_there_is_refused_with_those_that_are() {
    let mut config: Config = config(BackendChoice::Tcp);
    config.process_group.tcp.interface = Some("nosuch0".into());
    for outcome in try_ranks(&config, 2, |manager| manager.map(drop)) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("no interface `nosuch0`") && error.contains("lo"), "{error}");
    }
}

#[test]
fn a_wrong_name_of_an_algorithm_is_refused_before_the_rank_joins() {
    let mut config: Config = config(BackendChoice::Auto);
    config.process_group.tcp.algorithm = "rinng".into();
    // Nobody else comes.
    let rendezvous = MemoryRendezvous::new(2).remove(0);
    let error = ProcessGroupManager::initialize(&config, &rendezvous).unwrap_err();
    assert!(matches!(&error, Error::Configuration(why) if why.contains("`rinng`")), "{error}");
}

#[test]
fn a_rank_alone_needs_no_interface_and_no_second_level() {
    let mut config: Config = config(BackendChoice::Auto);
    config.process_group.tcp.interface = Some("nosuch0".into());
    config.process_group.tcp.algorithm = "hierarchical".into();
    with_ranks(&config, 1, |mut manager| {
        let mut x = [3.0f32];
        manager.world().all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, [3.0]);
    });
}

#[test]
fn a_layout_that_does_not_fit_is_refused() {
    let mut config: Config = config(BackendChoice::Tcp);
    config.layout.pipeline_parallel = 3.try_into().unwrap();
    for outcome in try_ranks(&config, 4, |manager| manager.map(drop)) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("do not make the 4 ranks"), "{error}");
    }
}
