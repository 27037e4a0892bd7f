//! What comes of a merge, as data and as text.

use std::fmt::Write as _;

use ryzanstein_process_group::units::time;
use ryzanstein_process_group::{Failure, Outcome, Rank};
use serde::Serialize;

use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table, wrap};

/// What the records of a job's ranks say together. Ranks are global ones.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Report {
    /// The job; see [`FlightRecord::job`](ryzanstein_process_group::FlightRecord::job).
    pub job: String,
    /// Number of its ranks.
    pub world_size: usize,
    /// What is to be said first, the likeliest cause before the others.
    pub verdicts: Vec<Verdict>,
    /// Ranks that left a record.
    pub ranks: Vec<RankFile>,
    /// Ranks that left none.
    pub missing: Vec<Rank>,
    /// Files that do not count, and why.
    pub ignored: Vec<String>,
    /// Every group of more than one rank.
    pub groups: Vec<GroupReport>,
}

/// A sentence, and whom it is about.
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
    /// Where it ran.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// When the record was made, in nanoseconds since 1970.
    pub dumped_ns: u64,
}

/// One group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct GroupReport {
    /// Its name.
    pub name: String,
    /// Its members.
    pub members: Vec<Rank>,
    /// The members that left a record.
    pub ranks: Vec<RankState>,
    /// Its collectives.
    pub collectives: Sequence,
    /// Messages between two members, where there is something to say of them.
    pub messages: Vec<Sequence>,
    /// How late ranks came to its collectives; absent without two that can be compared.
    pub late: Option<Late>,
}

/// Where a rank is in a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RankState {
    /// The rank.
    pub rank: Rank,
    /// The call that it began last, if any is recorded.
    pub newest: Option<NewestCall>,
    /// Why the group failed on it, if so.
    pub failure: Option<Failure>,
}

/// A rank's newest call in a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct NewestCall {
    /// Its number.
    pub number: u64,
    /// What it was.
    pub call: String,
    /// The path it took.
    pub path: Option<String>,
    /// What became of it.
    pub outcome: Outcome,
    /// How long the call lasted; for one in progress, until the record was made. In nanoseconds.
    pub lasted_ns: u64,
    /// How long before the record it began, in nanoseconds.
    pub age_ns: u64,
}

/// Calls that are numbered together: the collectives of a group, or the messages from one member to another.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Sequence {
    /// For messages, the sender and the receiver.
    pub between: Option<(Rank, Rank)>,
    /// The newest that every member with a record has made; absent where a record does not go back that far.
    pub newest_of_all: Option<u64>,
    /// The first in which members called different things.
    pub mismatch: Option<Mismatch>,
    /// Members that others wait or waited for.
    pub behind: Vec<Behind>,
}

/// Members called different things under one number.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Mismatch {
    /// The number.
    pub number: u64,
    /// What was called, by most members first.
    pub calls: Vec<Called>,
}

/// A call, and who made it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Called {
    /// What was called.
    pub call: String,
    /// By whom.
    pub ranks: Vec<Rank>,
}

/// A member that has not made a call that others are or were in.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Behind {
    /// The member.
    pub rank: Rank,
    /// The number of the last call that it made; 0 for none.
    pub last: u64,
    /// What that was, where it is still recorded.
    pub last_call: Option<String>,
    /// What the others called next.
    pub next: Called,
    /// From the first of those calls until the member's record was made, in nanoseconds.
    pub for_ns: u64,
}

/// How late ranks came, by the hosts' clocks: between hosts it is as exact as those agree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Late {
    /// The rank that was latest, by its median time behind the first.
    pub rank: Rank,
    /// That median, in nanoseconds.
    pub median_ns: u64,
    /// Every call that was compared, oldest first.
    pub calls: Vec<LateCall>,
}

/// Who came last to a call.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LateCall {
    /// The call's number.
    pub number: u64,
    /// The rank that came last.
    pub last: Rank,
    /// How long after the first, in nanoseconds.
    pub skew_ns: u64,
}

/// Nanoseconds for people.
pub(super) fn lasting(ns: u64) -> String {
    time(ns as f64 / 1e3)
}

/// `rank 1`, `ranks 0, 2 and 3`.
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

impl Report {
    /// One line of JSON.
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| unreachable!("a report is data: {error}"))
    }

    /// For people: the verdicts, then the evidence.
    pub fn table(&self, screen: Screen) -> String {
        let mut text = String::new();
        for verdict in &self.verdicts {
            let tone = if verdict.ranks.is_empty() { Tone::Plain } else { Tone::Bad };
            let _ = writeln!(text, "{}", screen.paint(tone, &wrap(&verdict.text, 0, screen)));
        }
        let there: Vec<Rank> = self.ranks.iter().map(|file| file.rank).collect();
        let missing = if self.missing.is_empty() {
            "none is missing".into()
        } else {
            format!("none of {}", ranks(&self.missing))
        };
        let of = format!("job {}: records of {}, {missing}", self.job, ranks(&there));
        let _ = writeln!(text, "\n{}", wrap(&of, 0, screen));
        for why in &self.ignored {
            let _ = writeln!(
                text,
                "{}",
                screen.paint(Tone::Warning, &wrap(&format!("ignored {why}"), 0, screen))
            );
        }
        self.groups.iter().for_each(|group| text += &group.table(screen));
        text
    }
}

impl Sequence {
    /// `call 2`, or `message 2 from rank 0 to rank 1`.
    pub(super) fn numbered(&self, number: u64) -> String {
        match self.between {
            None => format!("call {number}"),
            Some((from, to)) => format!("message {number} from rank {from} to rank {to}"),
        }
    }
}

impl GroupReport {
    fn table(&self, screen: Screen) -> String {
        let head = format!("group `{}`: {}", self.name, ranks(&self.members));
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
                say(format!("rank {rank} failed: {}", failure.error));
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
            newest.path.as_deref().unwrap_or("-").into(),
            Cell::new(outcome, tone),
            lasting(newest.lasted_ns).into(),
            lasting(newest.age_ns).into(),
        ]
    }
}
