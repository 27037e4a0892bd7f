//! Merges the records of the ranks into one report. Pure.

use std::collections::{BTreeMap, BTreeSet};

use ryzanstein_process_group::{
    CallFingerprint, CallRecord, Failure, FlightRecord, GroupRecord, Operation, Outcome, Rank,
};

use super::read::Files;
use super::report::{
    Behind, Called, GroupReport, Late, LateCall, Mismatch, NewestCall, RankFile, RankState, Report, Sequence,
    Verdict, lasting, ranks,
};

/// Merges the records.
pub fn merge(files: &Files) -> Report {
    let records = &files.records;
    let world_size = records.first().map_or(0, |record| record.world_size);
    let there: BTreeSet<Rank> = records.iter().map(|record| record.rank).collect();
    let groups: Vec<GroupReport> = groups(records).iter().map(Group::report).collect();
    let missing: Vec<Rank> = Rank::all(world_size).filter(|rank| !there.contains(rank)).collect();
    Report {
        job: records.first().map(|record| record.job.clone()).unwrap_or_default(),
        world_size,
        verdicts: verdicts(&groups, &missing),
        ranks: records
            .iter()
            .map(|r| RankFile { rank: r.rank, host: r.host.clone(), pid: r.pid, dumped_ns: r.dumped_ns })
            .collect(),
        missing,
        ignored: files.ignored.clone(),
        groups,
    }
}

/// One group as its members recorded it.
struct Group<'a> {
    name: &'a str,
    members: &'a [Rank],
    parts: Vec<Part<'a>>,
}

/// The record that one rank has of a group.
struct Part<'a> {
    rank: Rank,
    dumped_ns: u64,
    group: &'a GroupRecord,
}

/// Returns the groups of several ranks, in the order in which the first rank with a record made them.
fn groups(records: &[FlightRecord]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for record in records {
        let shared = record.groups.iter().filter(|g| g.members.len() > 1 && g.members.contains(&record.rank));
        for group in shared {
            let part = Part { rank: record.rank, dumped_ns: record.dumped_ns, group };
            match groups.iter_mut().find(|g| g.name == group.name && g.members == group.members) {
                Some(known) => known.parts.push(part),
                None => {
                    groups.push(Group { name: &group.name, members: &group.members, parts: vec![part] });
                }
            }
        }
    }
    groups
}

/// A sequence of calls with common numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    Collectives,
    /// Messages between two global ranks.
    Messages {
        from: Rank,
        to: Rank,
    },
}

impl Lane {
    /// Returns the lane of a call; `None` for a message with a rank that the group does not have.
    fn of(call: &CallRecord, rank: Rank, members: &[Rank]) -> Option<Self> {
        Some(match call.fingerprint.operation {
            Operation::Send { to } => Self::Messages { from: rank, to: *members.get(to.index())? },
            Operation::Recv { from } => Self::Messages { from: *members.get(from.index())?, to: rank },
            _ => Self::Collectives,
        })
    }

    fn between(self) -> Option<(Rank, Rank)> {
        match self {
            Self::Collectives => None,
            Self::Messages { from, to } => Some((from, to)),
        }
    }

    fn has(self, rank: Rank) -> bool {
        self.between().is_none_or(|(from, to)| rank == from || rank == to)
    }

    /// Returns true if two fingerprints agree. The two ends of a message need not agree on the direction.
    fn agrees(self, a: &CallFingerprint, b: &CallFingerprint) -> bool {
        match self {
            Self::Collectives => a == b,
            Self::Messages { .. } => (a.dtype, a.count) == (b.dtype, b.count),
        }
    }
}

/// One rank's calls of a lane.
struct Recorded<'a> {
    rank: Rank,
    dumped_ns: u64,
    calls: Vec<&'a CallRecord>,
    /// Number of the last call; `None` if the record does not go back to it.
    last: Option<u64>,
}

/// Returns the number of the last call of an entry.
fn last_of(call: &CallRecord) -> u64 {
    call.number.saturating_add(call.calls).saturating_sub(1)
}

impl Group<'_> {
    fn report(&self) -> GroupReport {
        let lanes: BTreeSet<Lane> = self.parts.iter().flat_map(|part| self.lanes(part)).collect();
        let messages = lanes.into_iter().filter(|lane| *lane != Lane::Collectives);
        let messages = messages.map(|lane| sequence(lane, &self.calls(lane)));
        let collectives = self.calls(Lane::Collectives);
        GroupReport {
            name: self.name.to_owned(),
            members: self.members.to_vec(),
            ranks: self.parts.iter().map(Part::state).collect(),
            collectives: sequence(Lane::Collectives, &collectives),
            messages: messages.filter(|found| found.mismatch.is_some() || !found.behind.is_empty()).collect(),
            late: late(&collectives),
        }
    }

    fn lanes(&self, part: &Part<'_>) -> Vec<Lane> {
        part.group.calls.iter().filter_map(|call| Lane::of(call, part.rank, self.members)).collect()
    }

    fn calls(&self, lane: Lane) -> Vec<Recorded<'_>> {
        let parts = self.parts.iter().filter(|part| lane.has(part.rank));
        parts
            .map(|part| {
                let all = part.group.calls.iter();
                // A call that was only captured did not run, and its number was assigned again.
                let calls: Vec<&CallRecord> = all
                    .filter(|call| call.outcome != Outcome::Captured)
                    .filter(|call| Lane::of(call, part.rank, self.members) == Some(lane))
                    .collect();
                let newest = calls.iter().map(|call| last_of(call)).max();
                let last = newest.or((part.group.overwritten == 0).then_some(0));
                Recorded { rank: part.rank, dumped_ns: part.dumped_ns, calls, last }
            })
            .collect()
    }
}

impl Part<'_> {
    fn state(&self) -> RankState {
        let newest = self.group.calls.last().map(|call| {
            let until = call.returned_ns.unwrap_or(self.dumped_ns);
            NewestCall {
                number: last_of(call),
                call: call.fingerprint.to_string(),
                path: call.path.clone(),
                outcome: call.outcome,
                lasted_ns: until.saturating_sub(call.enqueued_ns),
                age_ns: self.dumped_ns.saturating_sub(call.enqueued_ns),
            }
        });
        RankState { rank: self.rank, newest, failure: self.group.failure.clone() }
    }
}

fn sequence(lane: Lane, all: &[Recorded<'_>]) -> Sequence {
    let newest_of_all = all.iter().map(|calls| calls.last).min().flatten();
    Sequence { between: lane.between(), newest_of_all, mismatch: mismatch(lane, all), behind: behind(all) }
}

/// Returns the calls of each number that several ranks made. A replay represents many and is compared with one of the same.
fn by_number<'a>(all: &'a [Recorded<'a>]) -> BTreeMap<(u64, u64), Vec<(Rank, &'a CallRecord)>> {
    let mut numbers = BTreeMap::<_, Vec<_>>::new();
    for Recorded { rank, calls, .. } in all {
        for call in calls {
            numbers.entry((call.number, call.calls)).or_default().push((*rank, *call));
        }
    }
    numbers
}

fn mismatch(lane: Lane, all: &[Recorded<'_>]) -> Option<Mismatch> {
    let numbers = by_number(all);
    let (number, calls) = numbers.into_iter().find_map(|((number, _), calls)| {
        let (_, first) = calls.first()?;
        let differ = calls.iter().any(|(_, call)| !lane.agrees(&first.fingerprint, &call.fingerprint));
        differ.then_some((number, calls))
    })?;
    Some(Mismatch { number, calls: who_called(&calls) })
}

/// Groups the calls by their content, with their ranks, the most frequent first.
fn who_called(calls: &[(Rank, &CallRecord)]) -> Vec<Called> {
    let mut called: Vec<Called> = Vec::new();
    for (rank, call) in calls {
        let call = call.fingerprint.to_string();
        match called.iter_mut().find(|known| known.call == call) {
            Some(known) => known.ranks.push(*rank),
            None => called.push(Called { call, ranks: vec![*rank] }),
        }
    }
    called.sort_by_key(|called| std::cmp::Reverse(called.ranks.len()));
    called
}

/// Returns the ranks that have not made a call that others are in or failed in. A rank that is in a call itself, or failed in
/// one, is waiting like the others.
fn behind(all: &[Recorded<'_>]) -> Vec<Behind> {
    let waits = |outcome| matches!(outcome, Outcome::InProgress | Outcome::Failed | Outcome::Enqueued);
    let stuck = |outcome| matches!(outcome, Outcome::InProgress | Outcome::Failed);
    let one = |me: &Recorded<'_>| {
        let last = me.last?;
        if me.calls.last().is_some_and(|call| stuck(call.outcome)) {
            return None;
        }
        let next = last.saturating_add(1);
        let holds = |call: &&CallRecord| call.number <= next && next <= last_of(call);
        let others: Vec<(Rank, &CallRecord)> = all
            .iter()
            .filter_map(|other| Some((other.rank, *other.calls.iter().find(|call| holds(call))?)))
            .collect();
        let began = others.iter().map(|(_, call)| call.enqueued_ns).min()?;
        // A record that was made before contains no later calls.
        let is_late = me.dumped_ns > began && others.iter().any(|(_, call)| waits(call.outcome));
        let last_call = me.calls.iter().find(|call| last_of(call) == last);
        is_late.then(|| Behind {
            rank: me.rank,
            last,
            last_call: last_call.map(|call| call.fingerprint.to_string()),
            next: who_called(&others).swap_remove(0),
            for_ns: me.dumped_ns - began,
        })
    };
    all.iter().filter_map(one).collect()
}

/// Returns the delays of ranks in the calls that all of them recorded.
fn late(all: &[Recorded<'_>]) -> Option<Late> {
    let mut behind = BTreeMap::<Rank, Vec<u64>>::new();
    let mut compared = Vec::new();
    for ((number, _), calls) in by_number(all) {
        if calls.len() < all.len() || calls.len() < 2 {
            continue;
        }
        let first = calls.iter().map(|(_, call)| call.enqueued_ns).min()?;
        for (rank, call) in &calls {
            behind.entry(*rank).or_default().push(call.enqueued_ns - first);
        }
        let (last, call) = calls.iter().max_by_key(|(_, call)| call.enqueued_ns)?;
        compared.push(LateCall { number, last: *last, skew_ns: call.enqueued_ns - first });
    }
    let medians = behind.into_iter().map(|(rank, mut times)| {
        times.sort_unstable();
        (times[(times.len() - 1) / 2], rank)
    });
    let (median_ns, rank) = medians.max_by_key(|(median, _)| *median)?;
    Some(Late { rank, median_ns, calls: compared })
}

/// Returns the verdicts, the likeliest cause first. Consequences of a cause are left out.
fn verdicts(groups: &[GroupReport], missing: &[Rank]) -> Vec<Verdict> {
    let failures: Vec<(&str, Rank, &Failure)> = groups
        .iter()
        .flat_map(|g| g.ranks.iter().filter_map(|r| Some((g.name.as_str(), r.rank, r.failure.as_ref()?))))
        .collect();
    let sequences =
        || groups.iter().flat_map(|g| g.messages.iter().chain([&g.collectives]).map(|s| (&*g.name, s)));
    let mut found: Vec<Verdict> =
        sequences().filter_map(|(group, s)| Some(of_mismatch(group, s, s.mismatch.as_ref()?))).collect();
    if found.is_empty() {
        found.extend(failures.iter().filter(|(.., f)| f.caused_by.is_empty()).map(|f| of_failure(*f)));
    }
    found.extend(missing.iter().filter_map(|rank| blamed(*rank, &failures)));
    found.extend(
        sequences().flat_map(|(group, s)| s.behind.iter().map(move |behind| of_behind(group, s, behind))),
    );
    if found.is_empty() {
        found.extend(failures.first().map(|failure| of_failure(*failure)));
    }
    if found.is_empty() && !missing.is_empty() {
        let text = format!("{} left no record: killed, stopped, or not asked for one", ranks(missing));
        found.push(Verdict { text, ranks: missing.to_vec() });
    }
    if found.is_empty() {
        found.extend(groups.iter().flat_map(in_progress));
    }
    if found.is_empty() {
        let text = "no calls differ, no rank is behind, and no call is in progress".into();
        found.push(Verdict { text, ranks: Vec::new() });
    }
    found
}

fn of_mismatch(group: &str, sequence: &Sequence, Mismatch { number, calls }: &Mismatch) -> Verdict {
    let said: Vec<String> =
        calls.iter().map(|called| format!("{} called {}", ranks(&called.ranks), called.call)).collect();
    let text =
        format!("calls differ in {} of group `{group}`: {}", sequence.numbered(*number), said.join(", "));
    // The minority is blamed; with equal numbers on each side, all are.
    let majority = usize::from(calls.len() > 1 && calls[0].ranks.len() > calls[1].ranks.len());
    Verdict { text, ranks: calls[majority..].iter().flat_map(|called| called.ranks.clone()).collect() }
}

fn of_failure((group, rank, failure): (&str, Rank, &Failure)) -> Verdict {
    let blamed = if failure.caused_by.is_empty() { vec![rank] } else { failure.caused_by.clone() };
    Verdict { text: format!("rank {rank} failed in group `{group}`: {}", failure.error), ranks: blamed }
}

/// Returns the verdict on a rank without a record that the others name as the cause of their failures: themselves, or through a rank
/// that told them.
fn blamed(rank: Rank, failures: &[(&str, Rank, &Failure)]) -> Option<Verdict> {
    let (group, _, failure) = failures.iter().find(|(.., failure)| failure.caused_by.contains(&rank))?;
    let mut accusers = BTreeSet::new();
    loop {
        let leads_here = |cause: &Rank| *cause == rank || accusers.contains(cause);
        let by = failures.iter().filter(|(.., failure)| failure.caused_by.iter().any(leads_here));
        let all: BTreeSet<Rank> = by.map(|(_, accuser, _)| *accuser).collect();
        if all == accusers {
            break;
        }
        accusers = all;
    }
    let accusers = ranks(&accusers.into_iter().collect::<Vec<_>>());
    let text = format!(
        "rank {rank} left no record, and {accusers} failed because of it, in group `{group}`: {}",
        failure.error
    );
    Some(Verdict { text, ranks: vec![rank] })
}

fn of_behind(group: &str, sequence: &Sequence, behind: &Behind) -> Verdict {
    let Behind { rank, last, last_call, next, for_ns } = behind;
    let last = match (last, last_call) {
        (0, _) => "it has made none".into(),
        (last, Some(call)) => format!("its last was {last}, {call}"),
        (last, None) => format!("its last was {last}"),
    };
    let text = format!(
        "rank {rank} is missing from {} of group `{group}`, {} by {}, for {}; {last}",
        sequence.numbered(behind.last.saturating_add(1)),
        next.call,
        ranks(&next.ranks),
        lasting(*for_ns)
    );
    Verdict { text, ranks: vec![*rank] }
}

fn in_progress(group: &GroupReport) -> Vec<Verdict> {
    let waiting = group.ranks.iter().filter_map(|state| {
        let newest = state.newest.as_ref().filter(|newest| newest.outcome == Outcome::InProgress)?;
        let NewestCall { number, call, lasted_ns, .. } = newest;
        let lasted = lasting(*lasted_ns);
        let text = format!(
            "rank {} is in call {number} of group `{}`, {call}, for {lasted}",
            state.rank, group.name
        );
        Some(Verdict { text, ranks: Vec::new() })
    });
    waiting.collect()
}
