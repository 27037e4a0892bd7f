//! Tests of groups on CPUs: messages, objects, subgroups, asynchronous calls, paths.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use proptest::prelude::*;
use ryz::doctor::measure_links;
use ryzanstein_config::BackendChoice;
use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::schedule::Algorithm;
use ryzanstein_process_group::{BackendKind, BufferMut, DType, Error, Operation, Rank, ReduceOp};
use ryzanstein_tests::{SOON, config, encrypted, in_good_order, on_hosts, same_bits, sockets, with_ranks};
use serde::{Deserialize, Serialize};

/// The doctor measures between the first ranks of three hosts.
#[test]
fn every_two_hosts_are_measured_in_both_directions() {
    on_hosts(&config(BackendChoice::Tcp), &["a", "b", "a", "c"], |mut manager| {
        let roster = manager.roster().clone();
        let links = measure_links(manager.world(), &roster).unwrap();
        let mut ends: Vec<_> = links.iter().map(|link| (link.from.as_str(), link.to.as_str())).collect();
        ends.sort_unstable();
        assert_eq!(ends, [("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")]);
        assert!(links.iter().all(|link| link.gbs > 0.0 && link.latency_us > 0.0), "{links:?}");
        manager.finalize().unwrap();
    });
}

#[test]
fn asynchronous_work_runs_in_order_and_gives_its_buffer_back() {
    in_good_order(&config(BackendChoice::Tcp), 3, |manager| {
        let group = manager.world();
        let works: Vec<_> = (0..20)
            .map(|i| group.all_reduce_async(vec![i as f32; 1000 + i], ReduceOp::Sum).unwrap())
            .collect();
        // A call on this thread comes after all of them.
        let mut last = [1i32];
        group.all_reduce(&mut last, ReduceOp::Sum).unwrap();
        assert_eq!(last, [3]);
        for (i, work) in works.into_iter().enumerate() {
            assert_eq!(work.wait().unwrap(), vec![3.0 * i as f32; 1000 + i]);
        }
    });
}

#[test]
fn work_overlaps_with_what_its_caller_does() {
    in_good_order(&config(BackendChoice::Tcp), 2, |manager| {
        let group = manager.world();
        let me = group.rank();
        let other = Rank(1 - me.0);
        // Each receive is under way before the message is even written; a blocking one would never get there.
        if me.0 == 0 {
            let work = group.recv_async(vec![0u8; 5], other).unwrap();
            assert_eq!(work.wait().unwrap(), b"hello");
        } else {
            let work = group.send_async(b"hello".to_vec(), other).unwrap();
            work.wait().unwrap();
        }
    });
}

#[test]
fn what_was_sent_arrives_while_its_sender_does_something_else() {
    for config in [config(BackendChoice::Tcp), encrypted()] {
        let (tell, told) = mpsc::channel();
        let (tell, told) = (Mutex::new(tell), Mutex::new(told));
        with_ranks(&config, 2, |mut manager| {
            let group = manager.world();
            let is_root = group.rank() == Rank(0);
            let mut x = vec![if is_root { 7u8 } else { 0 }; 4 << 20];
            if !is_root {
                // Meanwhile the root's socket fills up.
                std::thread::sleep(Duration::from_millis(100));
            }
            group.broadcast(&mut x, Rank(0)).unwrap();
            assert!(x.iter().all(|x| *x == 7));
            if is_root {
                // Makes no call that could send what is left.
                told.lock().unwrap().recv_timeout(SOON).expect("the other rank has received everything");
            } else {
                tell.lock().unwrap().send(()).unwrap();
            }
        });
    }
}

#[test]
fn many_tensors_go_in_few_messages() {
    in_good_order(&config(BackendChoice::Tcp), 4, |manager| {
        let me = i64::from(manager.rank().0);
        let group = manager.world();
        let before = group.profile().calls("all_reduce");
        let mut floats: Vec<Vec<f32>> = (0..50).map(|i| vec![(me + i) as f32; i as usize]).collect();
        let mut longs: Vec<Vec<i64>> = (0..3).map(|i| vec![me * i; 7]).collect();
        let mut all: Vec<&mut dyn BufferMut> = Vec::new();
        all.extend(floats.iter_mut().map(|v| v as &mut dyn BufferMut));
        all.extend(longs.iter_mut().map(|v| v as &mut dyn BufferMut));
        group.all_reduce_coalesced(&mut all, ReduceOp::Sum).unwrap();
        for (i, v) in floats.iter().enumerate() {
            assert!(v.iter().all(|x| *x == (6 + 4 * i) as f32));
        }
        for (i, v) in longs.iter().enumerate() {
            assert_eq!(*v, vec![6 * i as i64; 7]);
        }
        assert_eq!(group.profile().calls("all_reduce") - before, 2, "one message for each element type");
    });
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
enum Thing {
    Nothing,
    Named { name: String, values: Vec<Option<f64>>, map: BTreeMap<u32, String> },
}

#[test]
fn values_of_any_kind_are_broadcast_and_gathered() {
    in_good_order(&config(BackendChoice::Tcp), 3, |manager| {
        let me = manager.rank().0;
        let group = manager.world();
        let thing = Thing::Named {
            name: "räksmörgås".into(),
            values: vec![None, Some(f64::INFINITY)],
            map: [(7, "seven".into())].into(),
        };
        let got: Thing = group.broadcast_object((me == 2).then_some(&thing), Rank(2)).unwrap();
        assert_eq!(got, thing);
        let mine = if me == 1 { Thing::Nothing } else { thing.clone() };
        assert_eq!(group.all_gather_object(&mine).unwrap(), [thing.clone(), Thing::Nothing, thing]);
        let metrics = [(format!("m{me}"), f64::from(me))].into();
        let all = group.gather_metrics(&metrics).unwrap();
        assert_eq!(all.len(), 3);
        assert_eq!(all[&Rank(2)]["m2"], 2.0);
    });
}

#[test]
fn a_layout_gives_every_rank_its_groups() {
    let mut config = config(BackendChoice::Tcp);
    config.layout.pipeline_parallel = NonZeroU32::new(2).unwrap();
    config.layout.data_parallel = NonZeroU32::new(2).unwrap();
    in_good_order(&config, 8, |manager| {
        let me = manager.rank().0;
        let numbers = |ranks: &[Rank]| ranks.iter().map(|r| r.0).collect::<Vec<_>>();
        assert_eq!(numbers(manager.tensor_parallel().members()), [me / 2 * 2, me / 2 * 2 + 1]);
        assert_eq!(
            numbers(manager.pipeline_parallel().members()),
            [me % 2 + me / 4 * 4, me % 2 + me / 4 * 4 + 2]
        );
        assert_eq!(numbers(manager.data_parallel().members()), [me % 4, me % 4 + 4]);
        let mut sum = [me];
        manager.tensor_parallel().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [me / 2 * 4 + 1]);
        manager.data_parallel().all_reduce(&mut sum, ReduceOp::Max).unwrap();
        manager.world().all_reduce(&mut sum, ReduceOp::Max).unwrap();
        assert_eq!(sum, [13]);
    });
}

#[test]
fn any_list_of_ranks_makes_a_group_in_the_order_given() {
    in_good_order(&config(BackendChoice::Tcp), 4, |manager| {
        let me = manager.rank();
        for _ in 0..2 {
            let group = manager.new_group(&[Rank(3), Rank(0), Rank(2)]).unwrap();
            assert_eq!(group.is_none(), me.0 == 1);
            if let Some(mut group) = group {
                let mut all = [0u32; 3];
                group.all_gather_into(&[me.0], &mut all).unwrap();
                assert_eq!(all, [3, 0, 2]);
            }
        }
        assert!(matches!(manager.new_group(&[Rank(0), Rank(0)]), Err(Error::Invalid(_))));
        assert!(matches!(manager.new_group(&[Rank(9)]), Err(Error::Invalid(_))));
    });
}

#[test]
fn one_rank_alone_needs_nobody() {
    in_good_order(&config(BackendChoice::Tcp), 1, |manager| {
        let group = manager.tensor_parallel();
        let mut x = [3.0f32];
        group.all_reduce(&mut x, ReduceOp::Avg).unwrap();
        assert_eq!(x, [3.0]);
        assert_eq!(group.profile().rows()[0].path, "local");
    });
}

#[test]
fn auto_takes_cpus_for_threads_without_gpus_and_says_why_not_nccl() {
    let mut config = config(BackendChoice::Auto);
    // So it is on a machine with GPUs too.
    config.device.nccl = Some("/nonexistent/libnccl.so.2".into());
    config.device.cuda = Some("/nonexistent/libcuda.so.1".into());
    with_ranks(&config, 2, |manager| {
        assert_eq!(manager.backend(), BackendKind::Tcp);
        assert!(
            manager.backend_reason().contains("not `nccl`: no rank can use it"),
            "{}",
            manager.backend_reason()
        );
    });
}

#[test]
fn a_demanded_algorithm_is_taken_where_there_is_one() {
    for (mut config, link) in
        [(config(BackendChoice::Tcp), Path::SharedMemory as fn(_) -> _), (sockets(), Path::Tcp)]
    {
        config.process_group.tcp.algorithm = "ring".into();
        in_good_order(&config, 3, |manager| {
            let group = manager.world();
            group.all_reduce(&mut [0.0f32; 4], ReduceOp::Sum).unwrap();
            group.all_to_all(&mut [0.0f32; 3]).unwrap();
            let rows = group.profile().rows();
            let path = |op: &str| rows.iter().find(|r| r.op == op).unwrap().path.clone();
            assert_eq!(path("all_reduce"), link(Algorithm::Ring).to_string());
            assert_eq!(path("all_to_all"), link(Algorithm::Direct).to_string());
        });
    }
}

#[test]
fn the_path_that_is_explained_is_the_one_that_is_taken() {
    for n in [1, 3] {
        in_good_order(&config(BackendChoice::Tcp), n, |manager| {
            let group = manager.world();
            let sum = Operation::AllReduce(ReduceOp::Sum);
            let mut forced = vec![None];
            forced.extend(group.paths().into_iter().map(Some));
            for (path, count) in forced.into_iter().flat_map(|path| [(path, 10), (path, 300_000)]) {
                group.force_path(path).unwrap();
                let choice = group.explain(sum, DType::F32, count).unwrap();
                group.all_reduce(&mut vec![1.0f32; count], ReduceOp::Sum).unwrap();
                assert_eq!(group.last_call().and_then(|call| call.path), Some(choice.path));
                let is_forced = path.is_some_and(|path| path.suits(sum));
                assert!(!is_forced || path == Some(choice.path), "{choice:?}");
                let choice = group.explain(Operation::AllToAll, DType::U8, count).unwrap();
                group.all_to_all(&mut vec![1u8; count * n]).unwrap();
                assert_eq!(group.last_call().and_then(|call| call.path), Some(choice.path), "{path:?}");
            }
            let broadcast = Operation::Broadcast { root: Rank(9) };
            for (operation, count, said) in
                [(broadcast, 10, "rank 9 is not in group"), (sum, usize::MAX, "more than memory holds")]
            {
                let error = group.explain(operation, DType::F32, count).unwrap_err().to_string();
                assert!(error.contains(said), "{error}");
            }
        });
    }
}

#[test]
fn the_profile_counts_calls_and_bytes_by_class() {
    in_good_order(&config(BackendChoice::Tcp), 2, |manager| {
        let group = manager.world();
        for _ in 0..10 {
            group.all_reduce(&mut [1.0f32; 256], ReduceOp::Sum).unwrap();
        }
        group.broadcast(&mut vec![0u8; 5000], Rank(0)).unwrap();
        let rows = manager.profile();
        assert_eq!(rows.len(), 2, "{rows:?}");
        assert_eq!((rows[0].op, rows[0].calls, rows[0].bytes_up_to), ("all_reduce", 10, 1024));
        assert_eq!((rows[1].op, rows[1].calls, rows[1].bytes_up_to), ("broadcast", 1, 8192));
        assert_eq!(rows[0].dtype, DType::F32);
        assert!(
            rows[0].median_us > 0.0
                && rows[0].p99_us >= rows[0].median_us
                && rows[0].max_us >= rows[0].p99_us
        );
        assert!((rows[0].busbw_gbs - rows[0].algbw_gbs).abs() < 1e-9, "the factor of two ranks is one");
    });
}

#[test]
fn a_monitored_barrier_names_the_latest_and_by_how_much() {
    let reports = in_good_order(&config(BackendChoice::Tcp), 3, |manager| {
        if manager.rank().0 == 1 {
            std::thread::sleep(Duration::from_millis(120));
        }
        manager.world().monitored_barrier(Duration::from_secs(30)).unwrap()
    });
    assert!(reports.iter().all(|r| *r == reports[0]), "all ranks hear the same");
    assert_eq!(reports[0][0].rank, Rank(1));
    // A lower bound only: nothing keeps a busy machine from making it later still.
    assert!(reports[0][0].late >= Duration::from_millis(60), "{:?}", reports[0]);
}

#[test]
fn a_monitored_barrier_names_who_does_not_come_and_the_group_goes_on() {
    in_good_order(&config(BackendChoice::Tcp), 3, |manager| {
        let group = manager.world();
        if group.rank().0 != 2 {
            let error = group.monitored_barrier(Duration::from_millis(200)).unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(2)]), "{error}");
        }
        let mut x = [1];
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, [3]);
    });
}

#[test]
fn seven_and_sixteen_ranks_sum_gather_and_exchange() {
    for n in [7, 16] {
        in_good_order(&config(BackendChoice::Tcp), n, |manager| {
            let me = manager.rank().0;
            let group = manager.world();
            for path in group.paths() {
                group.force_path(Some(path)).unwrap();
                for length in [1, 1000, 70_001] {
                    let mut x = vec![me + 1; length];
                    group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                    assert!(x.iter().all(|v| *v == (n * (n + 1) / 2) as u32));
                }
                let mut all = vec![u32::MAX; n];
                group.all_gather_into(&[me], &mut all).unwrap();
                assert_eq!(all, (0..n as u32).collect::<Vec<_>>());
                group.all_to_all(&mut all).unwrap();
                assert_eq!(all, vec![me; n]);
            }
        });
    }
}

#[test]
fn neighbours_that_all_send_first_do_not_wait_for_each_other() {
    // The long messages do not fit the sockets: they are taken in, in pieces, while their receiver sends.
    in_good_order(&sockets(), 4, |manager| {
        let group = manager.world();
        let (me, n) = (group.rank().0, 4);
        for (round, length) in [300_000, 1, 70_000, 1_000_000, 12_345].into_iter().enumerate() {
            for distance in 1..n {
                let (to, from) = ((me + distance) % n, (me + n - distance) % n);
                let value = |rank: u32, i: usize| rank * 1000 + round as u32 + i as u32 % 7;
                let mine: Vec<u32> = (0..length).map(|i| value(me, i)).collect();
                group.send(&mine, Rank(to)).unwrap();
                let mut got = vec![u32::MAX; length];
                group.recv(&mut got, Rank(from)).unwrap();
                assert!(
                    got.iter().enumerate().all(|(i, v)| *v == value(from, i)),
                    "round {round} from {from}"
                );
            }
            let mut sum = vec![1u32; 50_000];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert!(sum.iter().all(|v| *v == n));
        }
    });
}

#[test]
fn messages_that_come_early_wait_for_their_receiver() {
    in_good_order(&config(BackendChoice::Tcp), 3, |manager| {
        let group = manager.world();
        let me = group.rank().0;
        // Larger than any socket buffer, everybody sending first, and a collective in between.
        let mine = vec![me; 4 << 20];
        for to in (0..3).filter(|r| *r != me) {
            group.send(&mine, Rank(to)).unwrap();
        }
        group.barrier().unwrap();
        for from in (0..3).filter(|r| *r != me) {
            let mut got = vec![9; 4 << 20];
            group.recv(&mut got, Rank(from)).unwrap();
            assert!(got.iter().all(|x| *x == from));
        }
    });
}

/// Returns the values of `process_group.tcp.algorithm` on one host.
fn names() -> Vec<&'static str> {
    let one_level = Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Hierarchical);
    ["auto"].into_iter().chain(one_level.map(Algorithm::name)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn all_ranks_get_the_same_bits_of_inexact_sums(
        n in 2..=6usize, count in 1..20_000usize, algorithm in prop::sample::select(names()), seed: u64, half: bool,
    ) {
        let mut config = sockets();
        config.process_group.tcp.algorithm = algorithm.into();
        let value = |rank: u32, i: usize| {
            let mut s = seed ^ (u64::from(rank) << 32 | i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            s ^= s >> 31;
            // Every bit pattern of the upper half, NaNs and infinities among them.
            f32::from_bits((s.wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 32) as u32)
        };
        let results = in_good_order(&config, n, |manager| {
            let me = manager.rank().0;
            let group = manager.world();
            if half {
                let mut x: Vec<half::bf16> = (0..count).map(|i| half::bf16::from_f32(value(me, i))).collect();
                group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                x.iter().map(|v| f32::from(*v)).collect()
            } else {
                let mut x: Vec<f32> = (0..count).map(|i| value(me, i)).collect();
                group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                x
            }
        });
        for other in &results[1..] {
            prop_assert!(same_bits(&results[0], other));
        }
    }
}

#[test]
fn a_message_whose_end_comes_with_the_next_call_behind_it_is_received_first() {
    with_ranks(&config(BackendChoice::Tcp), 2, |mut manager| {
        let group = manager.world();
        let (me, other) = (group.rank(), Rank(1 - group.rank().0));
        // One direction has more to carry than the other, by more in each round: the shorter message is there first, and
        // its sender comes to its receive while the longer one is on the way.
        let length = |rank: Rank, round: usize| 400_000 + rank.index() * (round % 100) * 10_000;
        for round in 0..1000 {
            let own = vec![me.0 as u8 + 1; length(me, round)];
            group.send(&own, other).unwrap();
            let mut got = vec![0u8; length(other, round)];
            group.recv(&mut got, other).unwrap();
            assert!(got.iter().all(|b| *b == other.0 as u8 + 1));
            group.barrier().unwrap();
        }
    });
}
