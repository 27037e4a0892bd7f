use ryzanstein_process_group::units;

use crate::doctor::facts::{Trial, TrialOutcome};
use crate::doctor::finding::{Finding, Status};
use ryzanstein_orchestrator::plural;

pub(super) fn diagnose(trials: &[Trial], gpus: usize) -> Vec<Finding> {
    trials.iter().flat_map(|trial| std::iter::once(one(trial, gpus)).chain(paths(trial))).collect()
}

/// Returns the conditions under which calls take each path.
fn paths(trial: &Trial) -> impl Iterator<Item = Finding> {
    let paths = trial.outcome.iter().flat_map(|outcome| &outcome.paths);
    paths.map(|(path, taken)| {
        Finding::new("job", "path", Status::Ok, format!("{taken} ({})", plural(trial.ranks, "rank"))).of(path)
    })
}

fn one(trial: &Trial, gpus: usize) -> Finding {
    let new = |status, seen| Finding::new("job", trial.name, status, seen);
    let ranks = trial.ranks;
    match &trial.outcome {
        Ok(outcome) => {
            let seen = describe(outcome, ranks);
            let on_gpu = outcome.backend == "nccl";
            if trial.name == "all_reduce_gpu" && gpus > 0 && !on_gpu {
                return new(Status::Warning, seen)
                    .because(outcome.reason.clone())
                    .remedy("see the findings on the GPUs and the libraries above");
            }
            new(Status::Ok, seen)
        }
        Err(why) => new(Status::Broken, format!("{}: {why}", plural(ranks, "rank")))
            .because("a group on this machine does not start, or computes wrong values")
            .remedy("see the findings above; RYZ_LOG__LEVEL=debug and NCCL_DEBUG=INFO show more"),
    }
}

fn describe(outcome: &TrialOutcome, ranks: usize) -> String {
    let seen = format!(
        "{} on {}: right values on every path, ready in {}",
        plural(ranks, "rank"),
        outcome.backend,
        units::time(outcome.ready_ms * 1e3)
    );
    match outcome.median_us {
        Some(median) => format!("{seen}, 100 KB in {}", units::time(median)),
        None => seen,
    }
}
