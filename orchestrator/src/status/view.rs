//! The state of jobs as tables and as JSON. Unknown values are a dash, or null.

use std::fmt::Write as _;

use ryzanstein_process_group::{GroupActivity, units};

use super::sentence;
use super::wire::{Gpu, Job, Rank, State};
use crate::plural;
use crate::table::{self, Cell, Column, Screen, Tone};

/// Text of an unknown value.
const UNKNOWN: &str = "-";

/// Formats the jobs in one line each, so that the user can choose one.
pub fn list(jobs: &[Job], screen: Screen) -> String {
    let columns = [
        Column::left("job"),
        Column::left("name"),
        Column::right("ranks"),
        Column::right("epoch").drop_priority(2),
        Column::right("up").drop_priority(1),
        Column::left("state"),
        Column::left("program").drop_priority(3),
    ];
    let rows: Vec<Vec<Cell>> = jobs
        .iter()
        .map(|job| {
            let wrong = job.ranks.iter().filter(|rank| is_wrong(rank)).count();
            vec![
                job.pid.to_string().into(),
                job.name.as_str().into(),
                job.world_size.to_string().into(),
                job.epoch.to_string().into(),
                seconds(job.uptime_s).into(),
                if wrong == 0 {
                    Cell::new("running", Tone::Good)
                } else {
                    Cell::new(format!("{wrong} in trouble"), Tone::Bad)
                },
                job.program.as_str().into(),
            ]
        })
        .collect();
    table::table(&columns, &rows, screen)
}

/// Formats one job: a line about it, a row for each rank, and the troubles.
pub fn table(job: &Job, screen: Screen) -> String {
    let (ranks, up) = (plural(job.world_size as usize, "rank"), seconds(job.uptime_s));
    let head =
        format!("job {} ({} on {}): {ranks}, epoch {}, up {up}", job.name, job.pid, job.host, job.epoch);
    let program = table::cut(&job.program, screen.width.unwrap_or(usize::MAX));
    let mut text = format!("{}\n{program}\n", table::wrap(&head, 0, screen));
    text += &rank_table(&job.ranks, screen);
    for rank in &job.ranks {
        let Some(why) = explain(rank) else { continue };
        for line in table::wrap(&format!("rank {} {why}", rank.rank), 2, screen).lines() {
            let _ = writeln!(text, "{}", screen.paint(Tone::Bad, line));
        }
    }
    text
}

fn rank_table(ranks: &[Rank], screen: Screen) -> String {
    // Programs that do not use the library are described by the kernel alone.
    if ranks.iter().all(|rank| rank.groups.is_none()) {
        let columns = [
            Column::right("rank"),
            Column::left("state"),
            Column::left("process"),
            Column::left("waits in").drop_priority(3),
            Column::right("CPU time").drop_priority(2),
            Column::right("memory").drop_priority(1),
            Column::right("pid").drop_priority(4),
        ];
        let row = |rank: &Rank| -> Vec<Cell> {
            let letter = rank.process_state.as_ref().and_then(|state| state.chars().next());
            vec![
                rank.rank.to_string().into(),
                state_cell(rank),
                or_dash(letter.map(sentence::process_state)),
                or_dash(rank.waits_in.clone()),
                or_dash(rank.cpu_s.map(seconds)),
                or_dash(rank.resident_bytes.map(bytes)),
                or_dash(rank.pid.map(|pid| pid.to_string())),
            ]
        };
        return table::table(&columns, &ranks.iter().map(row).collect::<Vec<_>>(), screen);
    }
    let has_gpus = ranks.iter().any(|rank| rank.gpu.is_some());
    let mut columns = vec![
        Column::right("rank"),
        Column::left("state"),
        Column::left("last call"),
        Column::right("in call"),
        Column::right("calls").drop_priority(5),
        Column::right("median").drop_priority(4),
        Column::right("p99").drop_priority(3),
        Column::right("memory").drop_priority(2),
    ];
    if has_gpus {
        columns.extend([
            Column::right("GPU %").drop_priority(1),
            Column::right("GPU memory").drop_priority(1),
            Column::right("°C").drop_priority(2),
        ]);
    }
    columns.extend([Column::right("heartbeat").drop_priority(6), Column::right("pid").drop_priority(7)]);
    let rows: Vec<Vec<Cell>> = ranks.iter().map(|rank| row(rank, has_gpus)).collect();
    table::table(&columns, &rows, screen)
}

fn row(rank: &Rank, has_gpus: bool) -> Vec<Cell> {
    let groups = rank.groups.as_ref();
    let group = groups.and_then(|groups| busiest(groups));
    let recent = group.and_then(|group| group.recent);
    let mut cells: Vec<Cell> = vec![
        rank.rank.to_string().into(),
        state_cell(rank),
        group.map_or_else(|| UNKNOWN.into(), last_call).into(),
        or_dash(group.and_then(|group| group.current.as_ref()).map(|call| seconds(call.elapsed_s))),
        or_dash(groups.map(|groups| groups.iter().map(|group| group.calls).sum::<u64>().to_string())),
        or_dash(recent.map(|recent| units::time(recent.median_us))),
        or_dash(recent.map(|recent| units::time(recent.p99_us))),
        or_dash(groups.and(rank.resident_bytes).map(bytes)),
    ];
    if has_gpus {
        cells.extend(gpu_cells(rank.gpu.as_ref()));
    }
    cells.extend([or_dash(rank.heartbeat_age_s.map(seconds)), or_dash(rank.pid.map(|pid| pid.to_string()))]);
    cells
}

fn gpu_cells(gpu: Option<&Gpu>) -> [Cell; 3] {
    let Some(gpu) = gpu else {
        return [UNKNOWN.into(), UNKNOWN.into(), UNKNOWN.into()];
    };
    if gpu.lost {
        return [Cell::new("lost", Tone::Bad), UNKNOWN.into(), UNKNOWN.into()];
    }
    let memory = gpu.sample.memory_used_bytes.zip(gpu.sample.memory_total_bytes);
    [
        or_dash(gpu.sample.utilization.map(|percent| percent.to_string())),
        or_dash(memory.map(|(used, total)| format!("{} of {}", bytes(used), bytes(total)))),
        or_dash(gpu.sample.temperature.map(|celsius| celsius.to_string())),
    ]
}

/// Returns the group in a call of which a rank is; otherwise the group with the most calls.
fn busiest(groups: &[GroupActivity]) -> Option<&GroupActivity> {
    groups.iter().max_by_key(|group| (group.current.is_some(), group.calls, group.begun))
}

/// Formats the last call: `world 41 all_reduce`.
fn last_call(group: &GroupActivity) -> String {
    let call = match (&group.current, group.begun, &group.operation) {
        (Some(call), ..) => format!("{} {}", call.number, call.operation),
        (None, Some(number), Some(operation)) => format!("{number} {operation}"),
        _ => return UNKNOWN.into(),
    };
    format!("{} {call}", group.name)
}

const fn state_name(state: State) -> &'static str {
    match state {
        State::Running => "running",
        State::NoProgress => "no progress",
        State::Silent => "silent",
        State::Stopped => "stopped",
        State::Exited => "exited",
    }
}

fn state_cell(rank: &Rank) -> Cell {
    let text = match (rank.state, rank.exit_code, rank.signal) {
        (State::Exited, Some(code), _) => format!("exited {code}"),
        (State::Exited, None, Some(signal)) => format!("killed {signal}"),
        _ => state_name(rank.state).to_owned(),
    };
    let tone = match rank.state {
        State::Running => Tone::Good,
        State::Exited if rank.exit_code == Some(0) => Tone::Faint,
        _ => Tone::Bad,
    };
    Cell::new(text, tone)
}

fn is_wrong(rank: &Rank) -> bool {
    let is_lost = rank.gpu.as_ref().is_some_and(|gpu| gpu.lost);
    is_lost
        || match rank.state {
            State::Running => false,
            State::Exited => rank.exit_code != Some(0),
            State::NoProgress | State::Silent | State::Stopped => true,
        }
}

/// Returns the explanation that follows the rank in a sentence, if it has trouble.
fn explain(rank: &Rank) -> Option<String> {
    match rank.state {
        State::NoProgress => rank
            .no_progress
            .as_ref()
            .map(|call| format!("makes no progress: {}", sentence::no_progress(call, None))),
        State::Silent => Some(format!(
            "is silent: no heartbeat for {}; its process is in state {}",
            seconds(rank.heartbeat_age_s.unwrap_or_default()),
            rank.process_state
                .as_ref()
                .and_then(|state| state.chars().next())
                .map_or_else(|| "unknown".into(), sentence::process_state)
        )),
        State::Stopped => {
            let pid = rank.pid.unwrap_or_default();
            Some(format!("is stopped by a signal; kill -CONT {pid} continues it"))
        }
        _ if is_wrong(rank) && rank.state == State::Running => {
            Some("has lost its GPU: only a reset of the GPU or of the host brings it back".into())
        }
        _ => None,
    }
}

fn seconds(seconds: f64) -> String {
    match seconds as u64 {
        _ if seconds == 0.0 => "< 1 ms".into(),
        0..120 => units::time(seconds * 1e6),
        whole @ 120..7200 => format!("{} min", whole / 60),
        whole => format!("{} h", whole / 3600),
    }
}

fn bytes(bytes: u64) -> String {
    units::bytes(bytes as f64)
}

fn or_dash(text: Option<String>) -> Cell {
    text.map_or_else(|| UNKNOWN.into(), Cell::from)
}

/// Formats one line: every job with all known values.
pub fn json(jobs: &[Job]) -> String {
    #[derive(serde::Serialize)]
    struct Jobs<'a> {
        jobs: &'a [Job],
    }
    serde_json::to_string(&Jobs { jobs }).expect("every job has a form in JSON")
}

#[cfg(test)]
mod tests {
    use ryzanstein_process_group::{CurrentCall, RecentLatency};
    use serde_json::Value;

    use super::super::wire::NoProgress;
    use super::*;

    fn rank(number: u32, state: State) -> Rank {
        Rank { rank: number, pid: Some(100 + number), state, ..Rank::default() }
    }

    fn waiting(number: u32) -> Rank {
        let current =
            CurrentCall { number: 41, operation: "all_reduce".into(), is_message: false, elapsed_s: 5.2 };
        let group = GroupActivity {
            name: "world".into(),
            size: 3,
            begun: Some(41),
            operation: Some("all_reduce".into()),
            ended: Some(40),
            current: Some(current),
            calls: 40,
            recent: Some(RecentLatency { calls: 40, median_us: 120.0, p99_us: 900.0 }),
            ..GroupActivity::default()
        };
        Rank {
            groups: Some(vec![group]),
            resident_bytes: Some(52_000_000),
            heartbeat_age_s: Some(0.4),
            ..rank(number, State::Running)
        }
    }

    fn job() -> Job {
        let missed = NoProgress {
            group: "world".into(),
            call: 41,
            operation: "all_reduce".into(),
            waiting: 2,
            waited_s: 5.2,
        };
        let stuck = Rank { no_progress: Some(missed), ..rank(2, State::NoProgress) };
        Job {
            name: "demo".into(),
            pid: 99,
            host: "node0".into(),
            program: "./engine".into(),
            epoch: 1,
            world_size: 3,
            uptime_s: 61.0,
            ranks: vec![waiting(0), waiting(1), stuck],
        }
    }

    #[test]
    fn the_table_says_who_waits_and_for_whom() {
        let text = table(&job(), Screen::PLAIN);
        let expected = "\
job demo (99 on node0): 3 ranks, epoch 1, up 61 s
./engine
rank  state        last call            in call  calls  median     p99  memory  heartbeat  pid
   0  running      world 41 all_reduce    5.2 s     40  120 us  900 us   52 MB     400 ms  100
   1  running      world 41 all_reduce    5.2 s     40  120 us  900 us   52 MB     400 ms  101
   2  no progress  -                          -      -       -       -       -          -  102
rank 2 makes no progress: it has not begun call 41 (all_reduce) of group 'world', in which 2 ranks have waited for 5 s
";
        assert_eq!(text, expected);
    }

    #[test]
    fn in_a_narrow_terminal_the_state_and_the_call_stay() {
        let text = table(&job(), Screen { width: Some(50), color: false });
        assert!(text.contains("rank  state        last call"), "{text}");
        assert!(!text.contains("pid") && !text.contains("p99"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 50), "{text}");
    }

    #[test]
    fn what_is_not_known_is_null_and_not_zero() {
        let value: Value = serde_json::from_str(&json(&[job()])).expect("one object");
        let ranks = &value["jobs"][0]["ranks"];
        assert_eq!(ranks[2]["state"], "no_progress");
        assert_eq!(
            (&ranks[2]["no_progress"]["call"], &ranks[2]["no_progress"]["waiting"]),
            (&41.into(), &2.into())
        );
        for key in ["heartbeat_age_s", "groups", "resident_bytes", "gpu", "gpu_memory", "exit_code"] {
            assert!(ranks[2].get(key).is_some_and(Value::is_null), "{key}: {}", ranks[2]);
        }
        assert_eq!(ranks[0]["groups"][0]["current"]["elapsed_s"], 5.2);
        assert_eq!(ranks[0]["groups"][0]["recent"]["p99_us"], 900.0);
    }

    #[test]
    fn a_lost_gpu_is_told_as_such() {
        let mut job = job();
        job.ranks[0].gpu = Some(Gpu { uuid: "GPU-1".into(), lost: true, ..Gpu::default() });
        let text = table(&job, Screen::PLAIN);
        assert!(text.contains("rank 0 has lost its GPU") && text.contains("  lost  "), "{text}");
        let value: Value = serde_json::from_str(&json(&[job])).expect("one object");
        let gpu = &value["jobs"][0]["ranks"][0]["gpu"];
        assert_eq!(
            (&gpu["lost"], &gpu["utilization"], &gpu["throttled_by"]),
            (&true.into(), &Value::Null, &Value::Null)
        );
    }

    #[test]
    fn several_jobs_are_a_list() {
        let text = list(&[job()], Screen::PLAIN);
        assert!(text.starts_with("job  name  ranks  epoch    up  state"), "{text}");
        assert!(text.contains(" 99  demo      3") || text.contains("99   demo      3"), "{text}");
        assert!(text.contains("1 in trouble"), "{text}");
    }
}
