use proptest::prelude::*;
use ryzanstein_process_group::{
    CallFingerprint, CallRecord, DType, Failure, FlightRecord, GroupRecord, Operation, Outcome, Rank,
    ReduceOp,
};

use super::{Files, Report, merge, timeline};
use crate::command::json;
use ryzanstein_orchestrator::table::Screen;

/// Time of the records: a second after the calls of [`call`].
const DUMPED: u64 = 2_000_000_000;

pub(super) fn record(rank: u32, world_size: usize) -> FlightRecord {
    FlightRecord {
        job: "job".into(),
        rank: Rank(rank),
        world_size,
        host: "node0".into(),
        pid: 100 + rank,
        dumped_ns: DUMPED,
        groups: Vec::new(),
    }
}

const SUM: Operation = Operation::AllReduce(ReduceOp::Sum);

/// Returns call `number`, which begins `number` ms after the first second, and lasts one.
fn call(number: u64, operation: Operation, outcome: Outcome) -> CallRecord {
    let enqueued_ns = 1_000_000_000 + number * 1_000_000;
    CallRecord {
        number,
        calls: 1,
        fingerprint: CallFingerprint::new(operation, DType::F32, 4),
        path: (outcome != Outcome::Failed).then(|| "tcp/direct".into()),
        enqueued_ns,
        returned_ns: (outcome != Outcome::InProgress).then_some(enqueued_ns + 1_000_000),
        outcome,
    }
}

fn done(number: u64) -> CallRecord {
    call(number, SUM, Outcome::Done)
}

fn waiting(number: u64) -> CallRecord {
    call(number, SUM, Outcome::InProgress)
}

/// Returns a job of as many ranks as there are lists, each with these calls in the world group; `None` left no record.
fn job<const N: usize>(calls: [Option<Vec<CallRecord>>; N]) -> Files {
    let mut records = Vec::new();
    for (rank, calls) in (0..).zip(calls) {
        let Some(calls) = calls else { continue };
        let world = GroupRecord {
            name: "world".into(),
            members: Rank::all(N).collect(),
            failure: None,
            overwritten: 0,
            calls,
        };
        records.push(FlightRecord { groups: vec![world], ..record(rank, N) });
    }
    Files { records, ignored: Vec::new() }
}

fn fail(files: &mut Files, rank: u32, error: &str, caused_by: &[u32]) {
    let record = files.records.iter_mut().find(|record| record.rank.0 == rank).expect("a record");
    let caused_by = caused_by.iter().copied().map(Rank).collect();
    record.groups[0].failure = Some(Failure { error: error.into(), caused_by });
}

/// Returns the first verdict, and the ranks that it blames.
fn first(report: &Report) -> (&str, Vec<u32>) {
    let verdict = &report.verdicts[0];
    (&verdict.text, verdict.ranks.iter().map(|rank| rank.0).collect())
}

#[test]
fn a_rank_that_never_came_to_a_call_is_missing_from_it() {
    let report = merge(&job([
        Some(vec![done(1), waiting(2)]),
        Some(vec![done(1)]),
        Some(vec![done(1), call(2, SUM, Outcome::Failed)]),
    ]));
    let wanted = "rank 1 is missing from call 2 of group `world`, all_reduce(sum) of 4 f32 by ranks 0 and 2, for 998 ms; its \
                  last was 1, all_reduce(sum) of 4 f32";
    assert_eq!(first(&report), (wanted, vec![1]));
    assert_eq!(report.groups[0].collectives.newest_of_all, Some(1));
}

#[test]
fn a_rank_that_called_something_else_is_named_with_what_the_others_called() {
    let report = merge(&job([
        Some(vec![done(1), call(2, SUM, Outcome::Failed)]),
        Some(vec![done(1), call(2, Operation::Barrier, Outcome::Failed)]),
        Some(vec![done(1), call(2, SUM, Outcome::Failed)]),
    ]));
    let wanted = "calls differ in call 2 of group `world`: ranks 0 and 2 called all_reduce(sum) of 4 f32, rank 1 called barrier";
    assert_eq!(first(&report), (wanted, vec![1]));
}

#[test]
fn a_rank_without_a_record_is_blamed_if_the_others_failed_because_of_it() {
    let failed = || Some(vec![done(1), call(2, SUM, Outcome::Failed)]);
    let mut files = job([failed(), None, None, failed()]);
    fail(&mut files, 0, "lost rank 2", &[2]);
    fail(&mut files, 3, "lost rank 2", &[2]);
    let report = merge(&files);
    let wanted =
        "rank 2 left no record, and ranks 0 and 3 failed because of it, in group `world`: lost rank 2";
    assert_eq!(first(&report), (wanted, vec![2]));
    assert_eq!(report.missing, [Rank(1), Rank(2)]);
    // One of them heard of it from the other before it saw the loss itself.
    fail(&mut files, 3, "rank 0 aborted: lost rank 2", &[0]);
    assert_eq!(first(&merge(&files)), (wanted, vec![2]));
}

#[test]
fn a_rank_that_failed_by_itself_comes_before_those_that_failed_because_of_it() {
    let failed = || Some(vec![call(1, SUM, Outcome::Failed)]);
    let mut files = job([failed(), failed()]);
    fail(&mut files, 0, "rank 1 aborted", &[1]);
    fail(&mut files, 1, "the program panicked", &[]);
    let report = merge(&files);
    assert_eq!(first(&report), ("rank 1 failed in group `world`: the program panicked", vec![1]));
}

#[test]
fn calls_that_all_ranks_are_in_blame_nobody() {
    let report = merge(&job([Some(vec![waiting(1)]), Some(vec![waiting(1)])]));
    let wanted = "rank 0 is in call 1 of group `world`, all_reduce(sum) of 4 f32, for 999 ms";
    assert_eq!(first(&report), (wanted, vec![]));
    assert_eq!(report.verdicts.len(), 2);
}

#[test]
fn a_record_made_before_the_others_called_says_nothing_of_it() {
    let mut files = job([Some(vec![done(1), waiting(2)]), Some(vec![done(1)])]);
    files.records[1].dumped_ns = 1_001_500_000;
    let report = merge(&files);
    assert!(report.groups[0].collectives.behind.is_empty(), "{report:?}");
}

#[test]
fn a_rank_whose_older_calls_are_overwritten_is_not_said_to_have_made_none() {
    let recv = call(1, Operation::Recv { from: Rank(0) }, Outcome::Done);
    let mut files = job([Some(vec![waiting(7)]), Some(vec![recv])]);
    files.records[1].groups[0].overwritten = 9;
    let report = merge(&files);
    assert_eq!(report.groups[0].collectives.newest_of_all, None);
    assert!(report.groups[0].collectives.behind.is_empty(), "{report:?}");
}

#[test]
fn a_receiver_of_a_message_that_was_not_sent_names_its_sender() {
    let recv = call(1, Operation::Recv { from: Rank(0) }, Outcome::InProgress);
    let report = merge(&job([Some(vec![done(1)]), Some(vec![done(1), recv]), Some(vec![done(1)])]));
    let (text, ranks) = first(&report);
    assert!(text.starts_with("rank 0 is missing from message 1 from rank 0 to rank 1 of group"), "{text}");
    assert_eq!(ranks, [0]);
}

#[test]
fn the_two_ends_of_a_message_differ_in_type_and_length_only() {
    let send = call(1, Operation::Send { to: Rank(1) }, Outcome::Done);
    let mut recv = call(1, Operation::Recv { from: Rank(0) }, Outcome::Done);
    let report = merge(&job([Some(vec![send.clone()]), Some(vec![recv.clone()])]));
    assert!(report.groups[0].messages.is_empty(), "{report:?}");
    recv.fingerprint.count = 5;
    let report = merge(&job([Some(vec![send]), Some(vec![recv])]));
    assert_eq!(report.groups[0].messages[0].mismatch.as_ref().unwrap().number, 1);
}

#[test]
fn a_replay_counts_for_its_calls_and_captured_calls_count_for_nothing() {
    let captured = || call(2, SUM, Outcome::Captured);
    let replay = CallRecord { calls: 3, ..call(2, SUM, Outcome::Enqueued) };
    let one_by_one = [done(2), done(3), done(4)];
    let report = merge(&job([
        Some(vec![done(1), captured(), replay]),
        Some([vec![done(1)], one_by_one.to_vec()].concat()),
    ]));
    assert_eq!(report.groups[0].collectives.newest_of_all, Some(4));
    assert_eq!(report.verdicts.len(), 1);
    assert!(report.verdicts[0].ranks.is_empty(), "{report:?}");
}

#[test]
fn the_latest_rank_is_the_one_with_the_greatest_median() {
    let shifted = |by: u64| {
        let later = |number| {
            let call = done(number);
            CallRecord { enqueued_ns: call.enqueued_ns + by, ..call }
        };
        Some((1..=3).map(later).collect::<Vec<_>>())
    };
    let mut files = job([shifted(0), shifted(50_000), shifted(20_000)]);
    // In one call, another rank is later still.
    files.records[0].groups[0].calls[1].enqueued_ns += 400_000;
    let report = merge(&files);
    let late = report.groups[0].late.as_ref().unwrap();
    assert_eq!((late.rank, late.median_ns), (Rank(1), 50_000));
    let calls: Vec<_> = late.calls.iter().map(|call| (call.number, call.last.0, call.skew_ns)).collect();
    assert_eq!(calls, [(1, 1, 50_000), (2, 0, 380_000), (3, 1, 50_000)]);
    assert!(
        report.table(Screen::PLAIN).contains(
            "latest: rank 1, by 50 us (median of 3 calls); the longest wait was for rank 0, 380 us in call 2"
        ),
        "{}",
        report.table(Screen::PLAIN)
    );
}

#[test]
fn the_timeline_has_a_slice_for_each_call_of_each_rank() {
    let files = job([Some(vec![done(1), waiting(2)]), Some(vec![done(1)])]);
    let timeline = timeline(&files.records);
    let events = timeline["traceEvents"].as_array().unwrap();
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(slices.len(), 3);
    assert_eq!((&slices[0]["pid"], &slices[0]["tid"], &slices[0]["ts"]), (&0.into(), &0.into(), &0.0.into()));
    assert_eq!(
        (&slices[0]["dur"], &slices[0]["args"]["call"]),
        (&1e3.into(), &"all_reduce(sum) of 4 f32".into())
    );
    assert_eq!((&slices[1]["dur"], &slices[1]["args"]["outcome"]), (&998e3.into(), &"in_progress".into()));
    let names: Vec<_> = events.iter().filter(|event| event["ph"] == "M").collect();
    assert_eq!(names.len(), 4);
    assert_eq!(names[0]["args"]["name"], "rank 0 (node0, pid 100)");
}

/// Generates numbers that are likely to coincide, or to overflow.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..6u64, Just(u64::MAX), any::<u64>()]
}

fn any_call() -> impl Strategy<Value = CallRecord> {
    let operation = prop_oneof![
        Just(SUM),
        Just(Operation::Barrier),
        (0..5u32).prop_map(|to| Operation::Send { to: Rank(to) }),
        (0..5u32).prop_map(|from| Operation::Recv { from: Rank(from) }),
    ];
    let outcome = prop_oneof![
        Just(Outcome::InProgress),
        Just(Outcome::Done),
        Just(Outcome::Enqueued),
        Just(Outcome::Captured),
        Just(Outcome::Failed)
    ];
    (number(), number(), operation, number(), proptest::option::of(number()), outcome).prop_map(
        |(number, calls, operation, enqueued_ns, returned_ns, outcome)| CallRecord {
            number,
            calls,
            enqueued_ns,
            returned_ns,
            ..call(1, operation, outcome)
        },
    )
}

#[test]
fn texts_of_records_cannot_change_the_terminal() {
    let mut files = job([Some(vec![done(1)]), None]);
    files.records[0].job = "a\x1b[31m\nrank 7 failed\x07".into();
    files.records[0].groups[0].name = "b\x1b]0;c".into();
    fail(&mut files, 0, "d\x1b[2J\ne", &[]);
    files.ignored.push("rank-\x1b[1m.json: it is no flight record".into());
    let table = merge(&files).table(Screen::PLAIN);
    assert!(table.chars().all(|c| c == '\n' || !c.is_control()), "{table:?}");
    assert!(!table.contains("\nrank 7") && !table.contains("\ne"), "{table:?}");
}

proptest! {
    #[test]
    fn any_records_give_a_report_and_a_timeline(
        ranks in proptest::collection::vec(
            (number(), number(), proptest::collection::vec(any_call(), 0..8), any::<bool>()), 0..4
        ),
    ) {
        let mut files = job([const { None }; 4]);
        for (rank, (dumped_ns, overwritten, calls, is_there)) in (0..).zip(ranks) {
            if !is_there {
                continue;
            }
            let world = GroupRecord {
                name: "world".into(),
                members: Rank::all(4).collect(),
                failure: None,
                overwritten,
                calls,
            };
            files.records.push(FlightRecord { dumped_ns, groups: vec![world], ..record(rank, 4) });
        }
        let report = merge(&files);
        prop_assert!(!report.verdicts.is_empty());
        prop_assert_eq!(report.ranks.len(), files.records.len());
        report.table(Screen { width: Some(60), color: true });
        json(&report);
        timeline(&files.records);
    }

    /// Whatever part of a good run is left, no rank is blamed.
    #[test]
    fn rings_of_any_length_blame_nobody_for_calls_that_went_well(kept in proptest::collection::vec(0..20usize, 3)) {
        let all: Vec<CallRecord> = (1..=20).map(done).collect();
        let part = |kept: usize| Some(all[20 - kept..].to_vec());
        let mut files = job([part(kept[0]), part(kept[1]), part(kept[2])]);
        for (record, kept) in files.records.iter_mut().zip(&kept) {
            record.groups[0].overwritten = 20 - *kept as u64;
        }
        let report = merge(&files);
        prop_assert!(report.verdicts.iter().all(|verdict| verdict.ranks.is_empty()), "{:?}", report);
    }
}
