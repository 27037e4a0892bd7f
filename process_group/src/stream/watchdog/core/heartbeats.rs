//! Detects members whose processes do not respond. A watchdog answers while its rank computes, but not while its process is
//! stopped.
//!
//! Not [`Liveness`](crate::link::mesh::Liveness), which CPU groups use: the watchdogs have a thread and idle links anyway. Asking over
//! these costs no connections, so every member is asked, also in large groups. It also finds a watchdog that hangs, and a process
//! that stops during a wait after at most 3 s, not 4.5 s.

use std::time::{Duration, Instant};

/// Time that a rank waits in a call before it asks, and interval at which it asks from then on.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Silence since the first question after which a member is unresponsive.
const SILENT_AFTER: Duration = Duration::from_secs(3);

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Member {
    heard: Instant,
    is_silent: bool,
    has_left: bool,
}

/// Time of the last message of each member.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Heartbeats {
    asked: Option<Instant>,
    members: Vec<Option<Member>>,
}

/// What a check found.
#[derive(Default, Debug)]
pub(super) struct HeartbeatCheck {
    /// True if all members are to be asked.
    pub(super) ask: bool,
    /// Members that have stopped responding.
    pub(super) fell_silent: Vec<usize>,
}

impl Heartbeats {
    pub(super) fn new(members: usize) -> Self {
        Self { asked: None, members: (0..members).map(|_| None).collect() }
    }

    /// Notes a message of a member. Returns `true` if it had been silent.
    pub(super) fn heard(&mut self, position: usize, now: Instant) -> bool {
        let Some(member) = &mut self.members[position] else { return false };
        member.heard = now;
        std::mem::take(&mut member.is_silent)
    }

    /// Notes that a member answers no more, as it has left.
    pub(super) fn left(&mut self, position: usize, now: Instant) {
        self.members[position] = Some(Member { heard: now, is_silent: false, has_left: true });
    }

    /// Checks the members while this rank waits for others; the result is empty if it does not wait.
    pub(super) fn check(
        &mut self,
        others: impl Iterator<Item = usize>,
        waits_since: Option<Instant>,
        now: Instant,
    ) -> HeartbeatCheck {
        let waits = waits_since.is_some_and(|since| now.saturating_duration_since(since) >= ASK_EVERY);
        if !waits {
            self.asked = None;
            return HeartbeatCheck::default();
        }
        let is_first = self.asked.is_none();
        let ask = self.asked.is_none_or(|asked| now.saturating_duration_since(asked) >= ASK_EVERY);
        if ask {
            self.asked = Some(now);
        }
        let mut fell_silent = Vec::new();
        for position in others {
            let fresh = Member { heard: now, is_silent: false, has_left: false };
            let member = self.members[position].get_or_insert(fresh);
            if is_first {
                member.heard = now;
            }
            let is_late = now.saturating_duration_since(member.heard) >= SILENT_AFTER;
            if is_late && !member.is_silent && !member.has_left {
                member.is_silent = true;
                fell_silent.push(position);
            }
        }
        HeartbeatCheck { ask, fell_silent }
    }

    /// Returns true if a member is unresponsive.
    pub(super) fn is_silent(&self, position: usize) -> bool {
        self.members[position].as_ref().is_some_and(|member| member.is_silent)
    }
}
