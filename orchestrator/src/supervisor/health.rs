//! Detects troubles of ranks whose processes run: they are silent, or make no progress. No clock, processes or connections
//! here.
//!
//! A dead or stopped process is known from the kernel, immediately; see [`core`](super::core).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ryzanstein_process_group::{CurrentCall, GroupActivity, Rank, units};

use crate::status::wire::{NoProgress, Report};

/// Time that other ranks must have waited before a rank is reported to make no progress.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Number of heartbeats that must be missing before a rank is silent.
const MISSING_BEATS: u32 = 3;

/// The state of a rank's process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Process {
    /// The process runs, in this state: the letter of `/proc/PID/stat`, if that could be read.
    Running(Option<char>),
    /// A signal stopped the process.
    Stopped,
    /// The process has ended.
    Ended,
    /// The process runs on another node, if it runs.
    Elsewhere,
}

/// The last heartbeat of a rank.
#[derive(Clone, Debug)]
pub(crate) struct Heartbeat {
    /// Time of its arrival.
    pub heard: Duration,
    /// Its contents.
    pub report: Arc<Report>,
}

/// The supervisor's view of a rank.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// State of the process.
    pub process: Process,
    /// Last heartbeat; `None` for a program that has sent none in this epoch. It is never reported as silent.
    pub beat: Option<Heartbeat>,
}

/// The trouble of a running rank.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Trouble {
    /// The rank has stopped sending heartbeats: for this time, and with this state of its process if it is known.
    Silent(Duration, Option<char>),
    /// Others wait for the rank in a call that it has not begun. If it is in another call itself, that call, with its group.
    NoProgress(NoProgress, Option<(String, CurrentCall)>),
}

/// A notice to the user.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Notice {
    /// This rank has trouble.
    Wrong(Rank, Trouble),
    /// A silent rank sends heartbeats again.
    Speaks(Rank),
    /// A rank has begun the call that others waited in.
    Continues(Rank, NoProgress),
}

/// The present troubles, and those that have been reported.
#[derive(Debug)]
pub(crate) struct Watch {
    silence: Duration,
    troubles: BTreeMap<Rank, Trouble>,
    looked: Duration,
    /// Time at which this process continued, if it was stopped itself.
    woke: Duration,
}

impl Watch {
    /// Creates the watch for ranks that send a heartbeat in this interval.
    pub(crate) fn new(interval: Duration) -> Self {
        Self {
            silence: interval * MISSING_BEATS,
            troubles: BTreeMap::new(),
            looked: Duration::ZERO,
            woke: Duration::ZERO,
        }
    }

    /// Starts a new epoch: nothing is known of its ranks.
    pub(crate) fn clear(&mut self) {
        self.troubles.clear();
    }

    /// Returns the trouble of this rank.
    pub(crate) fn trouble(&self, rank: Rank) -> Option<&Trouble> {
        self.troubles.get(&rank)
    }

    /// Examines all ranks, and returns the changes since the last time.
    pub(crate) fn look(&mut self, now: Duration, ranks: &BTreeMap<Rank, Seen>) -> Vec<Notice> {
        // This process was stopped itself: heartbeats that arrived meanwhile may not have been read yet.
        if now.saturating_sub(std::mem::replace(&mut self.looked, now)) >= self.silence {
            self.woke = now;
        }
        let found = self.troubles(now, ranks);
        let begun = found.iter().filter(|(rank, trouble)| !self.is_known(**rank, trouble));
        let mut notices: Vec<Notice> =
            begun.map(|(rank, trouble)| Notice::Wrong(*rank, trouble.clone())).collect();
        for (rank, trouble) in &self.troubles {
            let Some(seen) = ranks.get(rank).filter(|seen| is_running(seen)) else { continue };
            match (trouble, found.get(rank)) {
                (Trouble::Silent(..), None | Some(Trouble::NoProgress(..))) => {
                    notices.push(Notice::Speaks(*rank));
                }
                (Trouble::NoProgress(call, _), None) if has_begun(seen, call) => {
                    notices.push(Notice::Continues(*rank, call.clone()));
                }
                _ => {}
            }
        }
        self.troubles = found;
        notices
    }

    fn is_known(&self, rank: Rank, trouble: &Trouble) -> bool {
        match (self.troubles.get(&rank), trouble) {
            (Some(Trouble::Silent(..)), Trouble::Silent(..)) => true,
            (Some(Trouble::NoProgress(old, _)), Trouble::NoProgress(new, _)) => {
                (&old.group, old.call) == (&new.group, new.call)
            }
            _ => false,
        }
    }

    fn troubles(&self, now: Duration, ranks: &BTreeMap<Rank, Seen>) -> BTreeMap<Rank, Trouble> {
        let mut found = BTreeMap::new();
        let mut heard: Vec<(Rank, &Heartbeat)> = Vec::new();
        let mut is_explained = false;
        for (rank, seen) in ranks {
            is_explained |= seen.process == Process::Stopped;
            let Some(beat) = seen.beat.as_ref().filter(|beat| is_running(seen) && !beat.report.leaving)
            else {
                continue;
            };
            let age = now.saturating_sub(beat.heard.max(self.woke));
            if age <= self.silence {
                heard.push((*rank, beat));
                continue;
            }
            let state = if let Process::Running(state) = seen.process { state } else { None };
            found.insert(*rank, Trouble::Silent(age, state));
            is_explained = true;
        }
        let waits = waits(&heard);
        let behind: Vec<_> = heard
            .iter()
            .filter_map(|(rank, beat)| Some((*rank, missed(beat, &waits)?, own_call(beat))))
            .collect();
        // A rank that is in a call itself waits for another rank. It is to blame only if no other rank is.
        is_explained |= behind.iter().any(|(_, _, own)| own.is_none());
        let to_blame = behind.into_iter().filter(|(_, _, own)| own.is_none() || !is_explained);
        found.extend(to_blame.map(|(rank, call, own)| (rank, Trouble::NoProgress(call, own))));
        found
    }
}

const fn is_running(seen: &Seen) -> bool {
    matches!(seen.process, Process::Running(_) | Process::Elsewhere)
}

fn has_begun(seen: &Seen, call: &NoProgress) -> bool {
    let groups = seen.beat.iter().flat_map(|beat| &beat.report.groups);
    groups.filter(|group| group.name == call.group).any(|group| group.begun >= Some(call.call))
}

/// A collective that ranks are in.
struct Wait<'a> {
    group: &'a str,
    call: u64,
    operation: &'a str,
    ranks: u32,
    /// Time at which the first of them began it.
    since: Duration,
}

/// Returns the collectives that ranks are in, by group and number.
fn waits<'a>(heard: &[(Rank, &'a Heartbeat)]) -> BTreeMap<(&'a str, u64), Wait<'a>> {
    let mut waits = BTreeMap::new();
    for (_, beat) in heard {
        for (group, current) in beat.report.groups.iter().filter_map(in_collective) {
            let elapsed = Duration::try_from_secs_f64(current.elapsed_s).unwrap_or_default();
            let since = beat.heard.saturating_sub(elapsed);
            let (group, call, operation) = (group.name.as_str(), current.number, current.operation.as_str());
            let wait = waits.entry((group, call)).or_insert(Wait { group, call, operation, ranks: 0, since });
            wait.ranks += 1;
            wait.since = wait.since.min(since);
        }
    }
    waits
}

fn in_collective(group: &GroupActivity) -> Option<(&GroupActivity, &CurrentCall)> {
    let current = group.current.as_ref().filter(|current| !current.is_message && !group.failed)?;
    Some((group, current))
}

/// Returns the call that this rank has not begun and in which others had waited for too long at the time of its heartbeat. In a
/// group, it is the first such call; of several groups, the one in which they have waited longest.
fn missed(beat: &Heartbeat, waits: &BTreeMap<(&str, u64), Wait<'_>>) -> Option<NoProgress> {
    let groups = beat.report.groups.iter().filter(|group| !group.failed);
    let missed = groups.filter_map(|group| {
        let next = group.begun?.checked_add(1)?;
        let (_, wait) = waits.range((group.name.as_str(), next)..).next()?;
        (wait.group == group.name).then_some(wait)
    });
    let (waited, wait) =
        missed.map(|wait| (beat.heard.saturating_sub(wait.since), wait)).max_by_key(|(waited, _)| *waited)?;
    (waited >= PATIENCE).then(|| NoProgress {
        group: wait.group.to_owned(),
        call: wait.call,
        operation: wait.operation.to_owned(),
        waiting: wait.ranks,
        waited_s: units::seconds(waited),
    })
}

/// Returns the call that a rank is in, messages included.
fn own_call(beat: &Heartbeat) -> Option<(String, CurrentCall)> {
    beat.report.groups.iter().find_map(|group| Some((group.name.clone(), group.current.clone()?)))
}

#[cfg(test)]
mod tests;
