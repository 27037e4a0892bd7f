//! The steps of a model's layers and the overlap of gradients, measured by two ranks that are threads.

use ryzanstein_benches::suite::overlap::{self, OverlapRequest};
use ryzanstein_benches::suite::steps::{self, ModelShape, StepRequest};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::table::Screen;
use ryzanstein_process_group::{MemoryRendezvous, Rank};

/// Returns the result of `measure` on rank 0 of two.
fn two_ranks<T: Send>(measure: impl Fn(&mut Orchestrator) -> T + Sync) -> T {
    let rendezvous = MemoryRendezvous::new(2);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = rendezvous
            .into_iter()
            .map(|rendezvous| {
                scope.spawn(|| {
                    let builder = Orchestrator::builder().set("process_group.backend", "tcp");
                    let mut rank = builder.rendezvous(rendezvous).initialize().expect("a rank");
                    let is_first = rank.manager().rank() == Rank(0);
                    let result = measure(&mut rank);
                    rank.finalize().expect("the ranks end together");
                    is_first.then_some(result)
                })
            })
            .collect();
        let results = ranks.into_iter().map(|rank| rank.join().expect("a rank ends"));
        results.collect::<Vec<_>>().into_iter().flatten().next().expect("rank 0")
    })
}

#[test]
fn sharded_steps_equal_unsharded_ones_and_their_efficiency_and_communication_are_told() {
    let request = StepRequest {
        shapes: vec![ModelShape::new("tiny", [64, 128, 4, 2], 1000)],
        layers: 2,
        batches: vec![1, 3],
        prompt: 64,
        steps: 2,
    };
    let (rows, table, told) = two_ranks(|rank| {
        let mut told = 0;
        let rows = steps::run(rank, &request, |_| told += 1).expect("steps");
        let around = steps::job_context(rank, None);
        (rows.clone(), steps::text(&rows, &around, 2, Screen::PLAIN), told)
    });
    let kinds: Vec<_> = rows.iter().map(|row| (row.step, row.sequences)).collect();
    assert_eq!((kinds.as_slice(), told), (&[("decode", 1), ("decode", 3), ("prefill", 1)][..], 3));
    for row in &rows {
        assert!(row.correct && row.difference > 0.0, "sums over shards are rounded: {row:?}");
        assert!((row.efficiency - row.one_us / row.median_us / 2.0).abs() < 1e-9, "{row:?}");
        let calls = |op: &str| {
            let part = row.communication.parts.iter().find(|part| part.op == op);
            part.map(|part| part.calls)
        };
        assert_eq!((calls("all_reduce"), calls("all_gather")), (Some(5.0), Some(1.0)), "{row:?}");
        let shares: f64 = row.communication.parts.iter().filter_map(|part| part.share).sum();
        let told = row.communication_share.unwrap_or(f64::NAN);
        assert!((told - shares).abs() < 1e-9 && shares > 0.0, "{row:?}");
    }
    let verdicts = steps::verdicts(&rows).map(|verdict| verdict.met);
    assert!(verdicts.iter().all(Option::is_some), "{verdicts:?}");
    for wanted in
        ["of 50 % means that sharding costs nothing", "prefill  tiny", "communication of", "limit 0.05: ok"]
    {
        assert!(table.contains(wanted), "`{wanted}` is not in\n{table}");
    }
    let json: serde_json::Value = serde_json::from_str(&steps::json(&rows[0])).expect("JSON");
    assert_eq!((json["shape"].as_str(), json["sequences"].as_u64()), (Some("tiny"), Some(1)));
}

#[test]
fn overlap_is_measured_by_size_of_the_buckets_and_its_gradients_are_right() {
    let request = OverlapRequest { bytes: 6_000_000, parameters: 6, steps: 2 };
    let report = two_ranks(|rank| overlap::run(rank, &request).expect("a report"));
    let buckets: Vec<_> = report.rows.iter().map(|row| (row.bucket_bytes, row.all_reduces)).collect();
    let all = [
        (None, 6),
        (Some(1_000_000), 6),
        (Some(5_000_000), 2),
        (Some(25_000_000), 2),
        (Some(100_000_000), 2),
    ];
    assert_eq!(buckets, all);
    assert!(report.is_correct() && report.errors == 0 && report.bytes == 6_000_000, "{report:?}");
    for row in &report.rows {
        let is_hidden = row.hidden.is_none_or(|share| (0.0..=1.0).contains(&share));
        assert!(
            row.step_us > 0.0 && is_hidden && row.hidden.is_none() == row.bucket_bytes.is_none(),
            "{row:?}"
        );
    }
    assert!(report.text(Screen::PLAIN).contains("the host waits, as for an accelerator"));
}
