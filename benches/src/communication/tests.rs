use ryzanstein_process_group::DType;

use super::*;

/// Returns calls of one size, as a profile of two ranks shows them.
fn row(op: &'static str, calls: u64, bytes: f64, call_us: f64) -> ProfileRow {
    ProfileRow {
        group: "world".into(),
        op,
        reduction: None,
        dtype: DType::F32,
        bytes_up_to: 1 << 20,
        bytes_mean: bytes,
        path: "nccl".into(),
        world_size: 2,
        calls,
        timed: calls.min(3),
        median_us: call_us,
        p90_us: call_us,
        p99_us: call_us,
        max_us: call_us,
        host_median_us: None,
        total_s: calls.min(3) as f64 * call_us / 1e6,
        waited_s: 0.0,
        algbw_gbs: 0.0,
        busbw_gbs: 0.0,
        link_share: None,
    }
}

const GPUS: JobContext = JobContext {
    ranks: 4,
    sharing_cpus: 4,
    hosts: 1,
    on_gpus: true,
    has_nvlink: true,
    link_gbs: Some(100.0),
    is_graph: true,
};

#[test]
fn shares_are_of_a_step_and_calls_that_were_timed_stand_for_the_others() {
    // 10 steps of 1 ms: 90 all-reduces of 20 us in two sizes, 10 gathers of 30 us.
    let rows = [
        row("all_gather", 10, 4e5, 30.0),
        row("all_reduce", 60, 8e3, 20.0),
        row("all_reduce", 30, 16e3, 20.0),
    ];
    let communication = Communication::new(&rows, 0.01, 10);
    let found: Vec<_> = communication.parts.iter().map(|part| (part.op.as_str(), part.calls)).collect();
    assert_eq!(found, [("all_reduce", 9.0), ("all_gather", 1.0)]);
    let near = |got: Option<f64>, want: f64| got.is_some_and(|got| (got - want).abs() < 1e-9);
    assert!(near(communication.parts[0].share, 0.18) && near(communication.parts[1].share, 0.03));
    assert!(near(communication.share(), 0.21) && communication.meets_target() == Some(false));
    let text = communication.text(&GPUS, Screen::PLAIN);
    assert!(text.contains("communication: 21.0 % of a step (target < 20 %): missed\n"), "{text}");
    assert_eq!(text.lines().count(), 4, "no advice yet: {text}");
}

#[test]
fn waits_for_late_ranks_are_no_communication() {
    // 10 steps of 1 ms with 9 calls each. Rank 0 records waits of 15 us a call; rank 1 is late, and waits for no other rank.
    let of = |call_us: f64, wait_us: f64| {
        let row = row("all_reduce", 90, 8e3, call_us);
        // Three of them are timed; waits are those of all calls.
        let (timed, calls) = (row.timed as f64, row.calls as f64);
        let waited_s = calls * wait_us / 1e6;
        let total_s = timed * call_us / 1e6 + waited_s;
        Communication::new(&[ProfileRow { waited_s, total_s, ..row }], 0.01, 10)
    };
    let near = |got: Option<f64>, want: f64| got.is_some_and(|got| (got - want).abs() < 1e-9);
    let alone = of(5.0, 15.0);
    assert!(near(alone.parts[0].call_us, 5.0) && near(alone.parts[0].wait_us, 15.0), "{alone:?}");
    assert!(near(alone.share(), 0.045), "{alone:?}");
    let both = Communication::of_ranks(&[alone, of(3.0, 0.0)]);
    assert!(near(both.parts[0].call_us, 3.0) && near(both.share(), 0.027), "{both:?}");
    assert!(near(both.parts[0].wait_us, f64::midpoint(2.0 + 15.0, 0.0)), "{both:?}");
    let text = both.text(&GPUS, Screen::PLAIN);
    assert!(text.contains("wait") && text.contains("8.5 us"), "{text}");
    let untimed = ProfileRow { timed: 0, total_s: 0.0, ..row("all_reduce", 90, 8e3, 0.0) };
    let missing = Communication::new(&[untimed], 0.01, 10);
    assert_eq!(Communication::of_ranks(&[of(3.0, 0.0), missing]).share(), None, "a rank timed none");
    let gathers = Communication::new(&[row("gather", 10, 8e3, 5.0)], 0.01, 10);
    assert_eq!(
        Communication::of_ranks(&[of(3.0, 0.0), gathers]).parts.len(),
        2,
        "an operation of one rank counts"
    );
}

#[test]
fn without_timed_calls_there_is_no_verdict() {
    let untimed = ProfileRow { timed: 0, total_s: 0.0, ..row("all_reduce", 9, 8e3, 0.0) };
    let communication = Communication::new(std::slice::from_ref(&untimed), 1.0, 1);
    assert_eq!((communication.share(), communication.meets_target()), (None, None));
    assert_eq!(communication.text(&GPUS, Screen::PLAIN), "");
    let rows = [row("all_gather", 10, 4e5, 30.0), untimed];
    let communication = Communication::new(&rows, 1.0, 1);
    assert_eq!((communication.share(), communication.meets_target()), (None, None), "a part is missing");
    let text = communication.text(&GPUS, Screen::PLAIN);
    assert!(text.contains("not timed") && text.ends_with("some operations were not timed\n"), "{text}");
    let alone = ProfileRow { world_size: 1, ..row("all_reduce", 9, 8e3, 10.0) };
    assert_eq!(Communication::new(&[alone], 1.0, 1).share(), None);
}

/// Returns the advice for one operation that takes half of a step.
fn advice(bytes: f64, call_us: f64, context: &JobContext) -> String {
    let calls = 9;
    let seconds = calls as f64 * call_us / 1e6 * 2.0;
    let communication = Communication::new(&[row("all_reduce", calls, bytes, call_us)], seconds, 1);
    communication.advice(context).expect("much communication").lines().collect::<Vec<_>>().join("\n")
}

#[test]
fn small_calls_are_bound_by_latency_and_large_ones_by_bandwidth() {
    // At 100 GB/s 1 MB needs 10 us.
    let cause = |bytes, us| advice(bytes, us, &GPUS).lines().next().unwrap_or_default().to_owned();
    assert_eq!(
        cause(1e6, 15.0),
        "all_reduce takes 50.0 % of a step, bound by bandwidth: 9 calls of 1 MB and 15 us, of which the bytes need 10 us."
    );
    assert!(cause(1e6, 25.0).contains("bound by latency"));
    let unknown = JobContext { link_gbs: None, ..GPUS };
    assert!(advice(1e6, 25.0, &unknown).contains("bound by bandwidth"));
    assert!(advice(1e5, 25.0, &unknown).contains("bound by latency"));
}

#[test]
fn advice_fits_the_cause_and_the_place() {
    let latency = advice(8e3, 20.0, &GPUS);
    assert!(latency.contains("more sequences") && latency.contains("such as 2"), "{latency}");
    assert!(!latency.contains("NVLink") && !latency.contains("--no-graph"), "{latency}");
    assert!(advice(8e3, 20.0, &JobContext { is_graph: false, ..GPUS }).contains("leave --no-graph out"));

    let bandwidth = advice(1e8, 1100.0, &JobContext { has_nvlink: false, ..GPUS });
    assert!(bandwidth.contains("ryz topo") && bandwidth.contains("--dtype bf16"), "{bandwidth}");
    assert!(bandwidth.contains("all_reduce_async") && !bandwidth.contains("more sequences"), "{bandwidth}");

    let hosts = advice(1e8, 1100.0, &JobContext { hosts: 2, ..GPUS });
    assert!(hosts.contains("spans 2 hosts") && hosts.contains("--pipeline-parallel 2"), "{hosts}");

    let cpus = advice(8e3, 20.0, &JobContext { on_gpus: false, has_nvlink: false, link_gbs: None, ..GPUS });
    assert!(cpus.contains("share its processors") && !cpus.contains("such as 2"), "{cpus}");
    let bound = JobContext { on_gpus: false, has_nvlink: false, link_gbs: None, sharing_cpus: 1, ..GPUS };
    let bound = advice(8e3, 20.0, &bound);
    assert!(!bound.contains("share its processors") && bound.contains("such as 2"), "{bound}");
}
