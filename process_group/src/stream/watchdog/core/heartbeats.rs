//! Which members' processes respond. A watchdog answers while its rank computes, not while its process is stopped.

use std::time::{Duration, Instant};

/// How long a rank waits in a call before it asks, and how often it asks from then on.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// A member that has said nothing for this long since it was first asked is unresponsive.
const SILENT_AFTER: Duration = Duration::from_secs(3);

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Member {
    heard: Instant,
    is_silent: bool,
    has_left: bool,
}

/// When each member was last heard from.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Heartbeats {
    asked: Option<Instant>,
    members: Vec<Option<Member>>,
}

/// What there is to do or to say.
#[derive(Default, Debug)]
pub(super) struct Beat {
    /// Ask all members.
    pub(super) ask: bool,
    /// A member has stopped responding.
    pub(super) fell_silent: Vec<usize>,
}

impl Heartbeats {
    pub(super) fn new(members: usize) -> Self {
        Self { asked: None, members: (0..members).map(|_| None).collect() }
    }

    /// A member has said something. `true` if it had been silent.
    pub(super) fn heard(&mut self, position: usize, now: Instant) -> bool {
        let Some(member) = &mut self.members[position] else { return false };
        member.heard = now;
        std::mem::take(&mut member.is_silent)
    }

    /// A member answers no more, as it has left.
    pub(super) fn left(&mut self, position: usize, now: Instant) {
        self.members[position] = Some(Member { heard: now, is_silent: false, has_left: true });
    }

    /// Looks, while this rank waits for others since some time; `None` if it does not.
    pub(super) fn look(
        &mut self,
        others: impl Iterator<Item = usize>,
        waits_since: Option<Instant>,
        now: Instant,
    ) -> Beat {
        let waits = waits_since.is_some_and(|since| now.saturating_duration_since(since) >= ASK_EVERY);
        if !waits {
            self.asked = None;
            return Beat::default();
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
        Beat { ask, fell_silent }
    }

    /// Whether a member is unresponsive.
    pub(super) fn is_silent(&self, position: usize) -> bool {
        self.members[position].as_ref().is_some_and(|member| member.is_silent)
    }
}
