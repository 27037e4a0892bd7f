//! NCCL, one process a rank and one GPU a process. All ignored: `cargo test -p ryzanstein-tests --test gpu -- --ignored
//! --test-threads=1` on a machine with GPUs, NCCL and NVRTC.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant};

use ryzanstein_config::{BackendChoice, Config, Timeout};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_process_group::device::{Device, DeviceBuffer, Launch};
use ryzanstein_process_group::{
    BackendKind, Buffer, BufferMut, DType, Element, Error, ProcessGroup, Rank, ReduceOp,
};
use ryzanstein_tests::gpu::{Ranks, gpus, memory_used, role, wait_for, wait_for_memory};
use ryzanstein_tests::{config, conformance};

/// How long a whole test may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long something takes at most that should take seconds.
const SOON: Duration = Duration::from_secs(30);

fn free_port() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("its address")
}

fn initialize(config: &Config) -> Result<Orchestrator, Error> {
    Orchestrator::initialize(config, &std::env::vars().collect())
}

fn nccl() -> Config {
    config(BackendChoice::Nccl)
}

/// In the test program: starts itself as `n` ranks and waits until all have ended well. In a rank: runs `rank`.
fn on_gpus(name: &str, n: usize, config: &Config, rank: impl FnOnce(&mut Orchestrator)) {
    if role().is_some() {
        let mut orchestrator = initialize(config).expect("this rank initialises");
        rank(&mut orchestrator);
        orchestrator.finalize().expect("this rank leaves in good order");
        return;
    }
    need(n);
    let folder = tempfile::tempdir().expect("a folder");
    let mut ranks = Ranks::start(name, n, free_port(), folder.path());
    for rank in 0..n {
        expect_success(&mut ranks, rank, folder.path());
    }
}

fn expect_success(ranks: &mut Ranks, rank: usize, folder: &Path) {
    let status = ranks.end(rank, PATIENCE);
    if !status.is_some_and(|s| s.success()) {
        let log = std::fs::read_to_string(folder.join(format!("rank-{rank}.log"))).unwrap_or_default();
        panic!("rank {rank} ended with {status:?} (none: not in time):\n{log}");
    }
}

fn suite(name: &str, n: usize) {
    on_gpus(name, n, &nccl(), |rank| conformance::run(rank.manager().world()));
}

#[test]
#[ignore = "needs 1 GPU"]
fn one_gpu_conforms() {
    suite("one_gpu_conforms", 1);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn two_gpus_conform() {
    suite("two_gpus_conform", 2);
}

#[test]
#[ignore = "needs 3 GPUs"]
fn three_gpus_conform() {
    suite("three_gpus_conform", 3);
}

#[test]
#[ignore = "needs 4 GPUs"]
fn four_gpus_conform() {
    suite("four_gpus_conform", 4);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn reductions_mean_what_is_documented() {
    on_gpus("reductions_mean_what_is_documented", 2, &nccl(), |rank| {
        let group = rank.manager().world();
        let me = group.rank().0;
        let mut reduce = |values: &[f32], op| {
            let mut x = group.place(values).unwrap();
            group.all_reduce(&mut x, op).unwrap();
            group.fetch(&x).unwrap()
        };
        // A NaN on one rank wins, wherever it is; zeros have an order; infinities are numbers.
        let mine = if me == 0 { [f32::NAN, 1.0, -1.0, f32::INFINITY] } else { [1.0, f32::NAN, -2.0, -5.0] };
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let got = reduce(&mine, op);
            assert!(got[0].is_nan() && got[1].is_nan(), "{op}: {got:?}");
        }
        assert_eq!(reduce(&mine, ReduceOp::Min)[2..], [-2.0, -5.0]);
        assert_eq!(reduce(&mine, ReduceOp::Max)[2..], [-1.0, f32::INFINITY]);
        // Integers wrap; their mean goes towards zero.
        let mut x = group.place(&[100i8, -128, 3, -3]).unwrap();
        let mut y = group.place(&[if me == 0 { -4i8 } else { 1 }, 127]).unwrap();
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        group.all_reduce(&mut y, ReduceOp::Avg).unwrap();
        assert_eq!(group.fetch(&x).unwrap(), [-56, 0, 6, -6]);
        assert_eq!(group.fetch(&y).unwrap(), [-1, -1]);
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_captured_sequence_gives_the_same_values_each_time_it_is_replayed() {
    on_gpus("a_captured_sequence_gives_the_same_values_each_time_it_is_replayed", 2, &nccl(), |rank| {
        let mut other = rank.manager().new_group(&[Rank(0), Rank(1)]).unwrap().unwrap();
        let group = rank.manager().world();
        let device: Device = group.device().unwrap().clone();
        let me = group.rank().0;
        let length = 10_007;
        let values: Vec<f32> = (0..length).map(|i| (i % 13 + me as usize) as f32).collect();
        let mut x = DeviceBuffer::from_slice(&device, &values).unwrap();
        let mut all = DeviceBuffer::new(&device, DType::F32, 2 * length).unwrap();
        // Once outside: connections and scratch memory are made then.
        group.all_reduce(&mut x, ReduceOp::Max).unwrap();
        group.all_gather_into(&x, &mut all).unwrap();
        group.synchronize().unwrap();
        let mut graph = None;
        let recorded = group
            .record(|group| {
                #[expect(unsafe_code, reason = "a graph keeps addresses")]
                // SAFETY: buffers and group live until the graph is dropped, below.
                let captured = unsafe {
                    device.stream().capture(|| {
                        group.all_reduce(&mut x, ReduceOp::Sum)?;
                        group.all_reduce(&mut x, ReduceOp::Max)?;
                        group.all_gather_into(&x, &mut all)
                    })
                };
                graph = Some(captured?);
                Ok::<_, Error>(())
            })
            .unwrap();
        let graph = graph.unwrap();
        assert!(graph.nodes() >= 3, "{graph:?}");
        let mut larger = DeviceBuffer::new(&device, DType::F32, 64 * length).unwrap();
        let refused = other.replay::<Error>(&recorded, || panic!("launched")).unwrap_err();
        assert!(refused.to_string().contains("another group recorded"), "{refused}");
        group.profile().clear();
        for _ in 0..3 {
            x.write(device.stream(), &values).unwrap();
            // Larger ones of the kind that needs scratch memory leave alone what the graph uses.
            group.all_reduce(&mut larger, ReduceOp::Max).unwrap();
            group.replay::<Error>(&recorded, || Ok(graph.launch(device.stream())?)).unwrap();
            group.synchronize().unwrap();
            let got: Vec<f32> = all.to_vec(device.stream()).unwrap();
            for (i, value) in got.iter().enumerate() {
                assert_eq!(*value, (2 * (i % length % 13) + 1) as f32, "element {i}");
            }
        }
        // Launched one behind the other, each overtakes the last on the host.
        for _ in 0..300 {
            group.replay::<Error>(&recorded, || Ok(graph.launch(device.stream())?)).unwrap();
        }
        group.synchronize().unwrap();
        // What the graph does is counted and timed as if it were called.
        let rows = group.profile().rows();
        let row = |op, reduction| {
            rows.iter()
                .find(|r| r.op == op && r.reduction == reduction && r.bytes_up_to == 1 << 16)
                .expect("a row")
        };
        for row in [row("all_reduce", Some("sum")), row("all_reduce", Some("max"))] {
            assert!(row.calls == 303 && row.timed >= 3, "{row:?}");
            assert!(row.median_us > 1.0, "{row:?}");
        }
        drop(graph);
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn asynchronous_coalesced_and_timed_calls() {
    on_gpus("asynchronous_coalesced_and_timed_calls", 2, &nccl(), |rank| {
        let manager = rank.manager();
        manager.clear_profile();
        let group = manager.world();
        let device: Device = group.device().unwrap().clone();
        let ones = || DeviceBuffer::from_slice(&device, &vec![1.0f32; 1 << 20]).unwrap();
        let waited = group.all_reduce_async(ones(), ReduceOp::Sum).unwrap();
        let joined = group.all_reduce_async(ones(), ReduceOp::Sum).unwrap();
        // On the compute stream, behind the asynchronous one.
        let mut joined = joined.join().unwrap();
        group.all_reduce(&mut joined, ReduceOp::Sum).unwrap();
        let waited = waited.wait().unwrap();
        group.synchronize().unwrap();
        for (buffer, want) in [(&waited, 2.0), (&joined, 4.0)] {
            let values: Vec<f32> = buffer.to_vec(device.stream()).unwrap();
            assert!(values.iter().all(|v| *v == want));
        }
        // Many types and lengths in one group, among them some that need kernels of our own.
        let mut a = group.place(&[1.0f32, f32::NAN]).unwrap();
        let mut b = group.place(&[3i32; 1000]).unwrap();
        let mut c = group.place::<f64>(&[]).unwrap();
        let mut d = group.place(&[half::bf16::from_f32(2.0); 77]).unwrap();
        let many: &mut [&mut dyn BufferMut] = &mut [&mut a, &mut b, &mut c, &mut d];
        group.all_reduce_coalesced(many, ReduceOp::Max).unwrap();
        let a = group.fetch(&a).unwrap();
        assert!(a[0] == 1.0 && a[1].is_nan());
        assert_eq!(group.fetch(&b).unwrap(), [3; 1000]);
        assert_eq!(group.fetch(&d).unwrap(), [half::bf16::from_f32(2.0); 77]);
        let objects = group.all_gather_object(&format!("rank {}", group.rank())).unwrap();
        assert_eq!(objects, ["rank 0", "rank 1"]);
        let rows = manager.profile();
        let row = rows.iter().find(|r| r.bytes_up_to == 4 << 20 && r.op == "all_reduce").expect("a row");
        assert_eq!((row.calls, row.path.as_str()), (3, "nccl"));
        assert!(row.median_us > 0.0 && row.host_median_us.is_some_and(|h| h > 0.0), "{row:?}");
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn host_memory_is_refused_and_the_group_goes_on() {
    on_gpus("host_memory_is_refused_and_the_group_goes_on", 2, &config(BackendChoice::Auto), |rank| {
        let manager = rank.manager();
        assert_eq!(manager.backend(), BackendKind::Nccl, "{}", manager.backend_reason());
        let group = manager.world();
        let error = group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        assert!(error.to_string().contains("the buffer is in host memory"), "{error}");
        assert!(group.place(&[0u8]).unwrap().view().host().is_err());
        group.barrier().unwrap();
    });
}

/// Every rank adds its global rank.
fn sum_of_ranks(group: &mut ProcessGroup, mine: Rank) {
    let mut x = group.place(&[mine.0]).unwrap();
    group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    let want = group.members().iter().map(|r| r.0).sum::<u32>();
    assert_eq!(group.fetch(&x).unwrap(), [want], "group {}", group.name());
}

#[test]
#[ignore = "needs 4 GPUs"]
fn groups_of_the_layout_and_groups_of_any_ranks() {
    let mut config = nccl();
    config.layout.tensor_parallel = Some(2.try_into().unwrap());
    config.layout.data_parallel = 2.try_into().unwrap();
    on_gpus("groups_of_the_layout_and_groups_of_any_ranks", 4, &config, |rank| {
        let manager = rank.manager();
        let me = manager.rank();
        sum_of_ranks(manager.tensor_parallel(), me);
        sum_of_ranks(manager.data_parallel(), me);
        sum_of_ranks(manager.pipeline_parallel(), me);
        for ranks in [[3, 1], [0, 2]] {
            if let Some(mut group) = manager.new_group(&ranks.map(Rank)).unwrap() {
                sum_of_ranks(&mut group, me);
            }
        }
        sum_of_ranks(manager.world(), me);
    });
}

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
    let folder = tempfile::tempdir().unwrap();
    let (n, before) = (some_gpus(), memory_used());
    let mut ranks = Ranks::start(NAME, n, free_port(), folder.path());
    for rank in 0..n {
        wait_for(&folder.path().join(format!("rank-{rank}.log")), "ready", PATIENCE);
    }
    std::thread::sleep(Duration::from_millis(500));
    let killed = Instant::now();
    ranks.kill(1);
    for rank in (0..n).filter(|r| *r != 1) {
        wait_for(&folder.path().join(format!("rank-{rank}.log")), "named it", SOON);
    }
    println!("named by all {} others {:?} after it was killed", n - 1, killed.elapsed());
    for rank in (0..n).filter(|r| *r != 1) {
        expect_success(&mut ranks, rank, folder.path());
    }
    println!("all have ended {:?} after", killed.elapsed());
    wait_for_memory(before, SOON);
}

/// As many as tests with any number of them take.
fn some_gpus() -> usize {
    need(2).min(4)
}

/// The number of GPUs, if there are so many. `scripts/gpu-suite` knows the words.
fn need(wanted: usize) -> usize {
    let here = gpus() as usize;
    assert!(here >= wanted, "this test needs {wanted} GPUs and CUDA shows {here}");
    here
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
    let folder = tempfile::tempdir().unwrap();
    let (_, before) = (some_gpus(), memory_used());
    let mut ranks = Ranks::start(NAME, 2, free_port(), folder.path());
    for rank in 0..2 {
        wait_for(&folder.path().join(format!("rank-{rank}.log")), "ready", PATIENCE);
    }
    std::thread::sleep(Duration::from_secs(1));
    let killed = Instant::now();
    ranks.kill(1);
    wait_for(&folder.path().join("rank-0.log"), "named it", SOON);
    println!("named {:?} after it was killed", killed.elapsed());
    expect_success(&mut ranks, 0, folder.path());
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
        println!("ended");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    need(2);
    let before = memory_used();
    let mut ranks = Ranks::start(name, 2, free_port(), folder.path());
    println!("{}", wait_for(&folder.path().join("rank-0.log"), "ended", SOON));
    expect_success(&mut ranks, 0, folder.path());
    drop(ranks);
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
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = Ranks::start(name, 2, free_port(), folder.path());
    assert!(ranks.end(0, SOON).is_some_and(|status| status.success()), "{}", log_of(folder.path(), 0));
    println!("{}", log_of(folder.path(), 0));
}

fn log_of(folder: &Path, rank: usize) -> String {
    std::fs::read_to_string(folder.join(format!("rank-{rank}.log"))).unwrap_or_default()
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
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_in_the_middle_of_a_call_ends() {
    const NAME: &str = "a_rank_that_leaves_in_the_middle_of_a_call_ends";
    if let Some(me) = role() {
        let mut rank = initialize(&nccl()).unwrap();
        let mut x = rank.manager().world().place(&[1.0f32; 1000]).unwrap();
        if me == 1 {
            std::thread::sleep(PATIENCE);
        }
        // Nobody ever joins in, and nobody waits for it.
        rank.manager().world().all_reduce(&mut x, ReduceOp::Max).unwrap();
        // The groups first: freeing the buffer waits for the GPU.
        drop(rank);
        drop(x);
        return;
    }
    need(2);
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = Ranks::start(NAME, 2, free_port(), folder.path());
    assert!(ranks.end(0, SOON).is_some_and(|status| status.success()), "{}", log_of(folder.path(), 0));
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_before_the_last_of_many_calls_is_named() {
    const NAME: &str = "a_rank_that_leaves_before_the_last_of_many_calls_is_named";
    let mut config = nccl();
    // Longer than the test may take: the deadline is not what finds it.
    config.process_group.timeout = Timeout::from_secs(2 * SOON.as_secs());
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        let group = rank.manager().world();
        let mut x = group.place(&[1.0f32; 1000]).unwrap();
        // In quick succession, so that the last has no mark of its own.
        for _ in 0..if me == 0 { 20 } else { 19 } {
            group.all_reduce(&mut x, ReduceOp::Max).unwrap();
        }
        if me == 1 {
            // Not `finalize`, whose barrier would be a call too.
            group.synchronize().unwrap();
            drop(rank);
            return;
        }
        let started = Instant::now();
        let error = group.synchronize().unwrap_err();
        println!("after {:?}: {error}", started.elapsed());
        let named = matches!(&error, Error::PeerLost { rank: Rank(1), .. });
        assert!(named && error.to_string().contains("it has left the group"), "{error}");
        return;
    }
    need(2);
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = Ranks::start(NAME, 2, free_port(), folder.path());
    assert!(ranks.end(0, SOON).is_some_and(|status| status.success()), "{}", log_of(folder.path(), 0));
    println!("{}", log_of(folder.path(), 0));
}

#[test]
#[ignore = "needs 2 GPUs"]
fn a_rank_that_leaves_before_a_call_that_connects_to_it_is_named() {
    const NAME: &str = "a_rank_that_leaves_before_a_call_that_connects_to_it_is_named";
    let mut config = nccl();
    config.process_group.timeout = Timeout::from_secs(2 * SOON.as_secs());
    // Connections are then made in the first calls.
    config.process_group.self_check = false;
    if let Some(me) = role() {
        let mut rank = initialize(&config).unwrap();
        if me == 1 {
            return;
        }
        let group = rank.manager().world();
        let mut x = group.place(&[1.0f32; 1000]).unwrap();
        let error = group.all_to_all(&mut x).and_then(|()| group.synchronize()).unwrap_err();
        let named = matches!(error.root_cause(), Error::PeerLost { rank: Rank(1), .. });
        assert!(named && error.to_string().contains("it has left the group"), "{error}");
        return;
    }
    need(2);
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = Ranks::start(NAME, 2, free_port(), folder.path());
    assert!(ranks.end(0, SOON).is_some_and(|status| status.success()), "{}", log_of(folder.path(), 0));
}

/// Ranks call different things; every rank's error must say what rank 1 called.
fn differing(name: &str, called: &str, work: impl Fn(Orchestrator, &mut DeviceBuffer) -> Result<(), Error>) {
    let mut config = nccl();
    // Longer than the test may take: the deadline is not what finds it.
    config.process_group.timeout = Timeout::from_secs(2 * SOON.as_secs());
    if role().is_some() {
        let mut rank = initialize(&config).unwrap();
        let device = rank.manager().world().device().unwrap().clone();
        let mut x = DeviceBuffer::from_slice(&device, &[1.0f32; 1000]).unwrap();
        let started = Instant::now();
        let error = work(rank, &mut x).expect_err("ranks called different things");
        println!("after {:?}: {error}", started.elapsed());
        let said = error.to_string();
        let named = matches!(error.root_cause(), Error::Mismatch { .. } | Error::PeerAborted { .. });
        assert!(named && said.contains("mismatched calls in group `world`"), "{said}");
        let both = format!("rank 1 calls {called}");
        assert!(said.contains("calls all_reduce(sum) of 1000 f32") && said.contains(&both), "{said}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let n = some_gpus();
    let mut ranks = Ranks::start(name, n, free_port(), folder.path());
    for rank in 0..n {
        expect_success(&mut ranks, rank, folder.path());
        println!("{}", log_of(folder.path(), rank));
    }
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
    mut rank: Orchestrator,
    x: &mut DeviceBuffer,
    other: impl Fn(&mut ProcessGroup, &mut DeviceBuffer) -> Result<(), Error>,
) -> Result<(), Error> {
    let group = rank.manager().world();
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
    differing("calls_that_wait_for_each_other_are_named", "broadcast(root 0) of 1000 f32", |rank, x| {
        one_of_many(rank, x, |group, x| group.broadcast(x, Rank(0)))
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn calls_that_differ_and_end_all_the_same_are_named() {
    differing(
        "calls_that_differ_and_end_all_the_same_are_named",
        "all_reduce(max) of 1000 f32",
        |rank, x| one_of_many(rank, x, |group, x| group.all_reduce(x, ReduceOp::Max)),
    );
}

#[test]
#[ignore = "needs 2 GPUs"]
fn last_calls_that_differ_are_named_before_ranks_leave() {
    let name = "last_calls_that_differ_are_named_before_ranks_leave";
    differing(name, "all_reduce(product) of 1000 f32", |mut rank, x| {
        let group = rank.manager().world();
        let op = if group.rank() == Rank(1) { ReduceOp::Product } else { ReduceOp::Sum };
        group.all_reduce(x, op)?;
        group.synchronize()?;
        rank.finalize()
    });
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
    differing(name, "all_reduce(max) of 1000 f32", |mut rank, x| {
        let group = rank.manager().world();
        let is_1 = group.rank() == Rank(1);
        a_graph_beside_single_calls(group, x, |number| {
            if number == 6 && is_1 { ReduceOp::Max } else { ReduceOp::Sum }
        })?;
        rank.finalize()
    });
}

#[test]
#[ignore = "needs 1 GPU"]
fn two_ranks_on_one_gpu_are_named_with_it() {
    const NAME: &str = "two_ranks_on_one_gpu_are_named_with_it";
    if role().is_some() {
        let error = initialize(&nccl()).unwrap_err().to_string();
        assert!(error.contains("ranks 0 and 1 on host") && error.contains("would share one GPU"), "{error}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = Ranks::start_at(NAME, 2, free_port(), folder.path(), |_| 0);
    for rank in 0..2 {
        expect_success(&mut ranks, rank, folder.path());
    }
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
    let folder = tempfile::tempdir().unwrap();
    let n = some_gpus();
    let mut ranks = Ranks::start(NAME, n, free_port(), folder.path());
    for rank in 0..n {
        expect_success(&mut ranks, rank, folder.path());
    }
}

#[test]
#[ignore = "needs 1 GPU"]
fn a_local_rank_without_a_gpu_is_named() {
    const NAME: &str = "a_local_rank_without_a_gpu_is_named";
    let here = gpus() as usize;
    if role().is_some() {
        let error = initialize(&nccl()).unwrap_err().to_string();
        let words = format!("local rank {here} needs GPU {here}, and CUDA shows this process {here}");
        assert!(error.contains(&words) && error.contains(&format!("rank {here} cannot use it")), "{error}");
        return;
    }
    need(1);
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = Ranks::start(NAME, here + 1, free_port(), folder.path());
    for rank in 0..=here {
        expect_success(&mut ranks, rank, folder.path());
    }
}

#[test]
#[ignore = "needs 1 GPU"]
fn an_allocation_over_the_budget_says_the_sums() {
    let mut config = nccl();
    config.device.memory_fraction = 0.01.try_into().unwrap();
    on_gpus("an_allocation_over_the_budget_says_the_sums", 1, &config, |rank| {
        let device: Device = rank.manager().world().device().unwrap().clone();
        let (_, limit) = device.budget();
        let error = DeviceBuffer::new(&device, DType::U8, limit as usize + 1).unwrap_err().to_string();
        assert!(
            error.contains("over the budget") && error.contains("device.memory_fraction = 0.01"),
            "{error}"
        );
        let held = DeviceBuffer::new(&device, DType::U8, 1 << 20).unwrap();
        let before = device.budget().0;
        drop(held);
        assert_eq!(before - device.budget().0, 1 << 20);
    });
}

/// Keys and back: the kernels that minima and maxima of floats go through, on one GPU, without NCCL.
#[test]
#[ignore = "needs 1 GPU"]
fn floats_come_back_from_their_keys_and_keys_are_in_the_order_of_the_floats() {
    fn there_and_back<F: Element, K: Element + Ord>(device: &Device, values: &[F]) {
        let source = include_str!("../../process_group/src/backend/nccl/combine.cu");
        let kind = format!("-DKIND={}", F::DTYPE as u8);
        for smallest in [0u8, 1] {
            let options = [kind.as_str(), &format!("-DSMALLEST={smallest}")];
            let module = device.kernels().module("combine.cu", source, &options).unwrap();
            let x = DeviceBuffer::from_slice(device, values).unwrap();
            let keys = DeviceBuffer::new(device, K::DTYPE, values.len()).unwrap();
            let back = DeviceBuffer::new(device, F::DTYPE, values.len()).unwrap();
            let (count, launch) = (values.len() as u64, Launch::over(values.len(), 256));
            let (x, k, y) = (x.address(), keys.address(), back.address());
            #[expect(unsafe_code, reason = "kernels take addresses")]
            // SAFETY: the kernels take two addresses and a 64-bit count; all buffers have that many elements and live on.
            unsafe {
                module.kernel("to_keys").unwrap().launch(device.stream(), launch, &[&x, &k, &count]).unwrap();
                module
                    .kernel("from_keys")
                    .unwrap()
                    .launch(device.stream(), launch, &[&k, &y, &count])
                    .unwrap();
            }
            let back: Vec<F> = back.to_vec(device.stream()).unwrap();
            let keys: Vec<K> = keys.to_vec(device.stream()).unwrap();
            let same = |a: &F, b: &F| bytemuck::bytes_of(a) == bytemuck::bytes_of(b);
            // The last is NaN, outermost on the side that is wanted; the others are in their order.
            let (nan, ordered) = keys.split_last().unwrap();
            assert!(back.iter().zip(values).take(values.len() - 1).all(|(a, b)| same(a, b)), "{}", F::DTYPE);
            assert!(ordered.is_sorted_by(|a, b| a < b), "{}: {smallest}", F::DTYPE);
            assert!(if smallest == 1 { nan < &ordered[0] } else { nan > &ordered[ordered.len() - 1] });
        }
    }
    on_gpus("floats_come_back_from_their_keys_and_keys_are_in_the_order_of_the_floats", 1, &nccl(), |rank| {
        let device: Device = rank.manager().world().device().unwrap().clone();
        let some = [f64::NEG_INFINITY, -3e4, -1.5, -0.0, 0.0, 1e-4, 2.0, 3e4, f64::INFINITY, f64::NAN];
        there_and_back::<f64, i64>(&device, &some);
        there_and_back::<f32, i32>(&device, &some.map(|v| v as f32));
        there_and_back::<half::f16, i32>(&device, &some.map(half::f16::from_f64));
        there_and_back::<half::bf16, i32>(&device, &some.map(half::bf16::from_f64));
    });
}

#[test]
#[ignore = "needs 1 GPU"]
fn quotients_on_a_gpu_are_those_of_the_processor() {
    fn divided<T: Element>(device: &Device, values: &[T], by: impl Fn(T, u32) -> T) {
        let source = include_str!("../../process_group/src/backend/nccl/combine.cu");
        let options = [format!("-DKIND={}", T::DTYPE as u8), "-DSMALLEST=0".into()];
        let module =
            device.kernels().module("combine.cu", source, &[options[0].as_str(), &options[1]]).unwrap();
        for ranks in [1u32, 3, 300] {
            let x = DeviceBuffer::from_slice(device, values).unwrap();
            let (address, count) = (x.address(), values.len() as u64);
            // Fewer threads than elements, so that each has several.
            let launch = Launch::over(values.len() / 3, 64);
            #[expect(unsafe_code, reason = "kernels take addresses")]
            // SAFETY: the kernel takes an address, a 64-bit and a 32-bit number; the buffer has that many elements.
            unsafe {
                module
                    .kernel("divide")
                    .unwrap()
                    .launch(device.stream(), launch, &[&address, &count, &ranks])
                    .unwrap();
            }
            let wanted: Vec<T> = values.iter().map(|v| by(*v, ranks)).collect();
            assert_eq!(x.to_vec::<T>(device.stream()).unwrap(), wanted, "{} / {ranks}", T::DTYPE);
        }
    }
    on_gpus("quotients_on_a_gpu_are_those_of_the_processor", 1, &nccl(), |rank| {
        let device: Device = rank.manager().world().device().unwrap().clone();
        macro_rules! integers {
            ($($type:ty),*) => {$({
                let mut values: Vec<$type> = (0..1021u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) as $type).collect();
                values.extend([<$type>::MIN, <$type>::MAX, 0]);
                divided(&device, &values, |v, n| (i128::from(v) / i128::from(n)) as $type);
            })*};
        }
        integers!(i8, u8, i32, u32, i64, u64);
        let floats: Vec<f32> = (0..1024).map(|i| (i as f32 - 500.0) * 1.7).collect();
        divided(&device, &floats, |v, n| v / n as f32);
        let doubles: Vec<f64> = floats.iter().map(|v| f64::from(*v) * 1e100).collect();
        divided(&device, &doubles, |v, n| v / f64::from(n));
        let halves: Vec<half::f16> = floats.iter().map(|v| half::f16::from_f32(*v)).collect();
        divided(&device, &halves, |v, n| half::f16::from_f32(v.to_f32() / n as f32));
        let brains: Vec<half::bf16> = floats.iter().map(|v| half::bf16::from_f32(*v)).collect();
        divided(&device, &brains, |v, n| half::bf16::from_f32(v.to_f32() / n as f32));
    });
}
