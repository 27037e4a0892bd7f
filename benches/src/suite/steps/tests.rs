use super::*;
use ryzanstein_orchestrator::table::Screen;

pub(super) fn row(step: &'static str, efficiency: f64, share: Option<f64>, difference: f64) -> StepRow {
    let correct = difference <= LIMIT;
    StepRow {
        step,
        shape: "llama-8b".into(),
        layers: 1,
        dtype: DTYPE,
        sequences: 8,
        tokens: 64,
        world_size: 2,
        backend: BackendKind::Tcp,
        one_us: 2000.0 * efficiency,
        median_us: 1000.0,
        speed_up: 2.0 * efficiency,
        efficiency,
        meets_target: correct && efficiency > ABOVE_EFFICIENCY,
        difference,
        correct,
        steps: 5,
        communication_share: share,
        communication: Communication::default(),
    }
}

#[test]
fn a_shape_that_the_ranks_do_not_divide_is_refused_with_the_legal_sizes() {
    let request = StepRequest::usual(Memory::Host);
    assert!(request.check(1).is_ok() && request.check(8).is_ok());
    let error = request.check(3).unwrap_err().to_string();
    assert!(error.contains("32") && error.contains('3'), "{error}");
    let many = StepRequest { steps: 8192, ..request };
    let error = many.check(1).unwrap_err().to_string();
    assert!(error.contains("--iters 8192") && error.contains("expected at most 8173"), "{error}");
}

#[test]
fn the_worst_step_with_right_values_is_judged() {
    let met = |rows: &[StepRow]| verdicts(rows).map(|verdict| verdict.met);
    assert_eq!(met(&[]), [None, None]);
    let good = row("decode", 0.97, Some(0.1), 0.01);
    assert_eq!(met(std::slice::from_ref(&good)), [Some(true), Some(true)]);
    assert_eq!(met(&[good.clone(), row("prefill", 0.9, None, 0.01)]), [Some(false), None]);
    let much = row("decode", 0.99, Some(0.25), 0.0);
    assert_eq!(met(&[much, row("prefill", 0.99, None, 0.01)]), [Some(true), Some(false)]);
    assert_eq!(met(&[good.clone(), row("decode", 0.99, Some(0.25), 0.0)]), [Some(true), Some(false)]);
    assert_eq!(met(&[good.clone(), row("decode", 0.1, Some(0.9), 0.5)]), [Some(true), Some(true)]);
    assert_eq!(met(&[StepRow { world_size: 1, ..good }]), [None, None]);
}

#[test]
fn on_processors_of_one_host_the_table_says_that_both_have_the_same() {
    let around = JobContext {
        ranks: 2,
        sharing_cpus: 2,
        hosts: 1,
        on_gpus: false,
        has_nvlink: false,
        link_gbs: None,
        is_graph: true,
    };
    let rows = [row("decode", 0.4, Some(0.1), 0.01), row("prefill", 0.4, None, 0.5)];
    let table = text(&rows, &around, 8, Screen::PLAIN);
    for part in [
        "all 8 processors",
        "2 ranks with 4 each",
        "of 50 % means that sharding costs nothing",
        "WRONG",
        "limit 0.05",
    ] {
        assert!(table.contains(part), "{part}: {table}");
    }
    assert_eq!(text(&[], &around, 8, Screen::PLAIN), "");
    for (hosts, told) in [(1, "of 1 host:"), (2, "of 2 hosts:")] {
        let table = text(&rows, &JobContext { hosts, sharing_cpus: 1, ..around }, 8, Screen::PLAIN);
        assert!(table.contains(told) && table.contains("2 ranks with 8 each."), "{table}");
        assert!(!table.contains("costs nothing"), "{table}");
    }
}

#[test]
fn logits_that_differ_in_number_or_are_none_are_infinitely_far_apart() {
    assert_eq!(difference(&[1.0, 2.0], &[1.0, 4.0]), 0.5);
    for (got, want) in [(vec![1.0], vec![1.0, 2.0]), (vec![f32::NAN], vec![1.0]), (vec![0.0], vec![0.0])] {
        assert_eq!(difference(&got, &want), f64::INFINITY, "{got:?} {want:?}");
    }
}

#[test]
fn a_line_of_json_has_the_documented_fields() {
    let line: serde_json::Value = serde_json::from_str(&json(&row("decode", 0.4, Some(0.1), 0.01))).unwrap();
    let fields: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        fields,
        [
            "backend",
            "communication",
            "communication_share",
            "correct",
            "difference",
            "dtype",
            "efficiency",
            "layers",
            "median_us",
            "meets_target",
            "one_us",
            "sequences",
            "shape",
            "speed_up",
            "step",
            "steps",
            "tokens",
            "world_size",
        ]
    );
    assert!(line["communication"].is_array() && line["step"] == "decode");
}
