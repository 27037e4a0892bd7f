//! Runs a probe in a separate process, so that no failure of the probe ends this one.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde::de::DeserializeOwned;

/// Parses the answer in a process's output: the last line of JSON, a `Result` whose error is represented by its text. NCCL may
/// log to the same stream.
pub(super) fn answer<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let parsed = text.lines().rev().find_map(|line| serde_json::from_str::<Result<T, String>>(line).ok());
    parsed.unwrap_or_else(|| Err(unknown_answer(text)))
}

/// Returns the reason against an answer that is none.
pub(super) fn unknown_answer(text: &str) -> String {
    format!("it answered `{}`", text.trim())
}

/// Returns the standard output of a process that exits with code 0. Kills it at the deadline.
pub(super) fn output(command: Command, timeout: Duration) -> Result<String, String> {
    let not_started = |error: std::io::Error| format!("it cannot be started: {error}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(not_started)?;
    let mut command = tokio::process::Command::from(command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let output = runtime.block_on(async {
        let child = command.spawn().map_err(not_started)?;
        // At the deadline its output is not waited for: a process that it started may keep the pipes open.
        match tokio::time::timeout(timeout, child.wait_with_output()).await {
            Ok(output) => output.map_err(|error| format!("it cannot be read: {error}")),
            Err(_) => Err(format!("it did not finish within {} s", timeout.as_secs())),
        }
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let err = String::from_utf8_lossy(&output.stderr);
    let last = err.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it wrote nothing");
    Err(format!("it ended with {}: {last}", output.status))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::TrialOutcome;

    #[test]
    fn the_answer_is_found_among_lines_of_a_log() {
        let outcome = TrialOutcome { backend: "nccl".into(), ..TrialOutcome::default() };
        let line = serde_json::to_string(&Ok::<_, String>(outcome.clone())).expect("text");
        let log = format!("node0:1 NCCL INFO x\n{line}\nnode0:1 NCCL INFO y\n");
        assert_eq!(answer::<TrialOutcome>(&log).expect("an answer"), outcome);
        let failed = serde_json::to_string(&Err::<TrialOutcome, _>("why not")).expect("text");
        assert_eq!(answer::<TrialOutcome>(&failed), Err("why not".into()));
        assert!(answer::<TrialOutcome>("nonsense").is_err_and(|error| error.contains("nonsense")));
    }

    #[test]
    fn a_process_that_does_not_end_is_killed_at_its_deadline() {
        // The shell waits for a process of its own, which keeps the pipes open.
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 30; true"]);
        let error = output(command, Duration::from_millis(50)).expect_err("too long");
        assert!(error.contains("did not finish"), "{error}");
    }

    #[test]
    fn a_process_that_fails_is_quoted() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo first; echo why not >&2; exit 3"]);
        let error = output(command, Duration::from_secs(20)).expect_err("failed");
        assert!(error.contains('3') && error.contains("why not"), "{error}");
    }
}
