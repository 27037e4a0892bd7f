//! The result of a merge, as data and as text.

use std::fmt::Write as _;

use ryzanstein_process_group::catalogue::without_colors;
use ryzanstein_process_group::units::time;
use ryzanstein_process_group::{Failure, Outcome, Rank};
use serde::Serialize;

use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table, wrap};

/// The result of merging the records of a job's ranks. Ranks are global ones.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Report {
    /// The job; see [`FlightRecord::job`](ryzanstein_process_group::FlightRecord::job).
    pub job: String,
    /// Number of ranks of the job.
    pub world_size: usize,
    /// The verdicts, the likeliest cause first.
    pub verdicts: Vec<Verdict>,
    /// Ranks that left a record.
    pub ranks: Vec<RankFile>,
    /// Ranks that left no record.
    pub missing: Vec<Rank>,
    /// Files that do not count, and the reasons.
    pub ignored: Vec<String>,
    /// Every group of more than one rank.
    pub groups: Vec<GroupReport>,
}

/// A sentence, and the ranks that it concerns.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Verdict {
    /// The sentence.
    pub text: String,
    /// The ranks that it blames.
    pub ranks: Vec<Rank>,
}

/// A rank that left a record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RankFile {
    /// The rank.
    pub rank: Rank,
    /// Name of its host.
    pub host: String,
    /// Process id of the rank.
    pub pid: u32,
    /// Time of the record, in nanoseconds since 1970.
    pub dumped_ns: u64,
}

/// One group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct GroupReport {
    /// Name of the group.
    pub name: String,
    /// Members of the group.
    pub members: Vec<Rank>,
    /// The members that left a record.
    pub ranks: Vec<RankState>,
    /// Collectives of the group.
    pub collectives: Sequence,
    /// Messages between two members, if there is something to report about them.
    pub messages: Vec<Sequence>,
    /// Delays of ranks in its collectives; absent without two that can be compared.
    pub late: Option<Late>,
}

/// The progress of a rank in a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RankState {
    /// The rank.
    pub rank: Rank,
    /// The call that it began last, if any is recorded.
    pub newest: Option<NewestCall>,
    /// The reason for the failure of the group on this rank, if it failed.
    pub failure: Option<Failure>,
}

/// A rank's newest call in a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct NewestCall {
    /// Number of the call.
    pub number: u64,
    /// Description of the call.
    pub call: String,
    /// The path of the call.
    pub path: Option<String>,
    /// Outcome of the call.
    pub outcome: Outcome,
    /// Duration of the call in nanoseconds; for one in progress, until the record was made.
    pub lasted_ns: u64,
    /// Time from the start of the call to the record, in nanoseconds.
    pub age_ns: u64,
}

/// Calls with common numbers: the collectives of a group, or the messages from one member to another.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Sequence {
    /// For messages, the sender and the receiver.
    pub between: Option<(Rank, Rank)>,
    /// Number of the newest call that every member with a record has made; absent if a record does not go back that far.
    pub newest_of_all: Option<u64>,
    /// The first call in which members called different things.
    pub mismatch: Option<Mismatch>,
    /// Members that others wait or waited for.
    pub behind: Vec<Behind>,
}

/// Different calls of members under one number.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Mismatch {
    /// Number of the calls.
    pub number: u64,
    /// The calls, the most frequent first.
    pub calls: Vec<Called>,
}

/// A call, and the ranks that made it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Called {
    /// Description of the call.
    pub call: String,
    /// The ranks that made the call.
    pub ranks: Vec<Rank>,
}

/// A member that has not made a call that others are or were in.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Behind {
    /// The member.
    pub rank: Rank,
    /// Number of the last call that it made; 0 for none.
    pub last: u64,
    /// Description of that call, if it is still recorded.
    pub last_call: Option<String>,
    /// The next call of the others.
    pub next: Called,
    /// Time from the first of those calls to the member's record, in nanoseconds.
    pub for_ns: u64,
}

/// Delays of ranks, by the hosts' clocks: between hosts they are as exact as the synchronisation of the clocks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Late {
    /// The rank with the greatest median delay behind the first.
    pub rank: Rank,
    /// That median, in nanoseconds.
    pub median_ns: u64,
    /// Every call that was compared, oldest first.
    pub calls: Vec<LateCall>,
}

/// The last rank to enter a call.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LateCall {
    /// Number of the call.
    pub number: u64,
    /// The rank that entered last.
    pub last: Rank,
    /// Delay of that rank after the first, in nanoseconds.
    pub skew_ns: u64,
}

/// Formats nanoseconds for people.
pub(super) fn lasting(ns: u64) -> String {
    time(ns as f64 / 1e3)
}

/// Formats ranks: `rank 1`, `ranks 0, 2 and 3`.
pub(super) fn ranks(ranks: &[Rank]) -> String {
    match ranks {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(ToString::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
    }
}

/// Returns a text of a record, which may contain anything, in one line without escape sequences and other control characters.
fn one_line(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => ' ',
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    without_colors(text).chars().map(shown).collect()
}

impl Report {
    /// Formats the report for people: the verdicts, then the evidence.
    pub fn table(&self, screen: Screen) -> String {
        let mut text = String::new();
        for verdict in &self.verdicts {
            let tone = if verdict.ranks.is_empty() { Tone::Plain } else { Tone::Bad };
            let _ = writeln!(text, "{}", screen.paint(tone, &wrap(&one_line(&verdict.text), 0, screen)));
        }
        let there: Vec<Rank> = self.ranks.iter().map(|file| file.rank).collect();
        let missing = if self.missing.is_empty() {
            "none is missing".into()
        } else {
            format!("none of {}", ranks(&self.missing))
        };
        let of = format!("job {}: records of {}, {missing}", one_line(&self.job), ranks(&there));
        let _ = writeln!(text, "\n{}", wrap(&of, 0, screen));
        for why in &self.ignored {
            let _ = writeln!(
                text,
                "{}",
                screen.paint(Tone::Warning, &wrap(&one_line(&format!("ignored {why}")), 0, screen))
            );
        }
        self.groups.iter().for_each(|group| text += &group.table(screen));
        text
    }
}

impl Sequence {
    /// Formats a number: `call 2`, or `message 2 from rank 0 to rank 1`.
    pub(super) fn numbered(&self, number: u64) -> String {
        match self.between {
            None => format!("call {number}"),
            Some((from, to)) => format!("message {number} from rank {from} to rank {to}"),
        }
    }
}

impl GroupReport {
    fn table(&self, screen: Screen) -> String {
        let head = format!("group `{}`: {}", one_line(&self.name), ranks(&self.members));
        let mut text = format!("\n{}\n", screen.paint(Tone::Strong, &wrap(&head, 0, screen)));
        let columns = [
            Column::right("rank"),
            Column::right("number"),
            Column::left("newest call"),
            Column::left("path").drop_priority(3),
            Column::left("outcome"),
            Column::right("lasted").drop_priority(1),
            Column::right("ago").drop_priority(2),
        ];
        let rows: Vec<Vec<Cell>> = self.ranks.iter().map(RankState::row).collect();
        text += &table(&columns, &rows, screen);
        let mut say = |line: String| {
            let _ = writeln!(text, "{}", wrap(&line, 2, screen));
        };
        if let Some(number) = self.collectives.newest_of_all.filter(|number| *number > 0) {
            say(format!("newest call that all of them have begun: {number}"));
        }
        if let Some(late) = &self.late {
            let worst = late.calls.iter().max_by_key(|call| call.skew_ns);
            let worst = worst.map_or_else(String::new, |worst| {
                let LateCall { number, last, skew_ns } = worst;
                format!("; the longest wait was for rank {last}, {} in call {number}", lasting(*skew_ns))
            });
            let calls = ryzanstein_orchestrator::plural(late.calls.len(), "call");
            say(format!(
                "latest: rank {}, by {} (median of {calls}){worst}",
                late.rank,
                lasting(late.median_ns)
            ));
        }
        for RankState { rank, failure, .. } in &self.ranks {
            if let Some(failure) = failure {
                say(format!("rank {rank} failed: {}", one_line(&failure.error)));
            }
        }
        text
    }
}

impl RankState {
    fn row(&self) -> Vec<Cell> {
        let rank = self.rank.to_string().into();
        let Some(newest) = &self.newest else { return vec![rank, "-".into(), "none recorded".into()] };
        let (outcome, tone) = match newest.outcome {
            Outcome::InProgress => ("in progress", Tone::Warning),
            Outcome::Done => ("done", Tone::Good),
            Outcome::Enqueued => ("enqueued", Tone::Plain),
            Outcome::Captured => ("captured", Tone::Plain),
            Outcome::Failed => ("failed", Tone::Bad),
        };
        vec![
            rank,
            newest.number.to_string().into(),
            newest.call.as_str().into(),
            one_line(newest.path.as_deref().unwrap_or("-")).into(),
            Cell::new(outcome, tone),
            lasting(newest.lasted_ns).into(),
            lasting(newest.age_ns).into(),
        ]
    }
}
