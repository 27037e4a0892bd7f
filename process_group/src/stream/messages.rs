//! The number and the sizes of the messages between each two ranks.
//!
//! Nothing on a GPU shows that a message will never come. So a rank that leaves tells each of the other ranks which messages the
//! two have exchanged.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::operation::{CallFingerprint, Operation};
use crate::types::rank::Rank;

/// The members that messages go to and come from, by position. In groups of more than 64, several members share a bit, so a set
/// that contains one of them seems to contain all.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct PeerSet {
    to: u64,
    from: u64,
}

impl PeerSet {
    /// Returns the peer of a point-to-point call; the empty set for a collective.
    pub(super) fn of(fingerprint: &CallFingerprint) -> Self {
        let bit = |peer: Rank| 1 << (peer.index() % 64);
        match fingerprint.operation {
            Operation::Send { to } => Self { to: bit(to), from: 0 },
            Operation::Recv { from } => Self { to: 0, from: bit(from) },
            _ => Self::default(),
        }
    }

    /// Returns only the members that messages come from.
    pub(super) const fn receives(self) -> Self {
        Self { to: 0, ..self }
    }

    /// Returns the union of both.
    pub(super) const fn union(self, other: Self) -> Self {
        Self { to: self.to | other.to, from: self.from | other.from }
    }

    /// Returns true if messages may go to the member at this position (`to`), or come from it.
    const fn may_hold(self, position: usize, to: bool) -> bool {
        let bits = if to { self.to } else { self.from };
        bits & 1 << (position % 64) != 0
    }
}

/// The number of messages in one direction between two members. Messages without elements are not counted: nothing is sent for
/// them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub(super) struct MessageCount {
    pub(super) messages: u64,
    pub(super) bytes: u64,
}

impl fmt::Display for MessageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.messages == 1 { "" } else { "s" };
        write!(f, "{} message{plural} of {} bytes", self.messages, self.bytes)
    }
}

/// Messages between two members, as one of the two has enqueued them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub(super) struct Exchange {
    pub(super) sent: MessageCount,
    pub(super) received: MessageCount,
}

/// Messages with every member of a group.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct MessageCounts {
    /// The messages that this rank has enqueued.
    mine: Vec<Exchange>,
    /// The messages with this rank, as counted by members that exchange no more.
    theirs: Vec<Option<Exchange>>,
}

/// A message that a member which has left did not send, did not receive, or has in another length. Its text continues "it has left
/// the group".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct UnmatchedMessage {
    /// Its position.
    pub(super) position: usize,
    /// True if that member is the sender and this rank the receiver; false for the other way round.
    pub(super) sends: bool,
    mine: MessageCount,
    theirs: MessageCount,
}

impl UnmatchedMessage {
    /// Returns true if it may be among messages with these peers.
    pub(super) const fn is_among(&self, peers: PeerSet) -> bool {
        peers.may_hold(self.position, !self.sends)
    }
}

impl fmt::Display for UnmatchedMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sends, mine, theirs, .. } = self;
        let number = theirs.messages.saturating_add(1);
        match (mine.messages > theirs.messages, sends) {
            (true, true) => write!(f, "without sending message {number} to this rank"),
            (true, false) => write!(f, "without receiving message {number} from this rank"),
            (false, true) => write!(f, "after it has sent this rank {theirs}; this rank receives {mine}"),
            (false, false) => {
                write!(f, "after it has received {theirs} from this rank, which sends {mine}")
            }
        }
    }
}

impl MessageCounts {
    pub(super) fn new(members: usize) -> Self {
        Self { mine: vec![Exchange::default(); members], theirs: vec![None; members] }
    }

    /// Counts a call `times` times, if it is a message.
    pub(super) fn count(&mut self, fingerprint: &CallFingerprint, times: u64) {
        let count = match fingerprint.operation {
            Operation::Send { to } => &mut self.mine[to.index()].sent,
            Operation::Recv { from } => &mut self.mine[from.index()].received,
            _ => return,
        };
        let bytes = (fingerprint.count * fingerprint.dtype.size()) as u64;
        if bytes > 0 {
            count.messages += times;
            count.bytes += bytes * times;
        }
    }

    /// Returns the messages with the member at this position.
    pub(super) fn with(&self, position: usize) -> Exchange {
        self.mine[position]
    }

    /// Stores the counts of a member that exchanges no more.
    pub(super) fn ended_with(&mut self, position: usize, exchange: Exchange) {
        self.theirs[position] = Some(exchange);
    }

    /// Returns messages of this rank that have no counterpart, or one of another length, at a member that exchanges no more. Those
    /// that this rank receives come first: they never arrive, while those that it sends may have been buffered.
    pub(super) fn unmatched(&self) -> Vec<UnmatchedMessage> {
        let ended = self.mine.iter().zip(&self.theirs).enumerate();
        let ended = ended.filter_map(|(position, (mine, theirs))| Some((position, mine, (*theirs)?)));
        let directions = ended.flat_map(|(position, mine, theirs)| {
            [
                UnmatchedMessage { position, sends: true, mine: mine.received, theirs: theirs.sent },
                UnmatchedMessage { position, sends: false, mine: mine.sent, theirs: theirs.received },
            ]
        });
        // The messages of this rank so far should be the beginning of those of the other.
        let is_unmatched = |UnmatchedMessage { mine, theirs, .. }: &UnmatchedMessage| {
            mine.messages > theirs.messages
                || mine.bytes > theirs.bytes
                || mine.messages == theirs.messages && mine.bytes != theirs.bytes
        };
        let mut unmatched: Vec<_> = directions.filter(is_unmatched).collect();
        unmatched.sort_by_key(|unmatched| !unmatched.sends);
        unmatched
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::DType;
    use crate::types::operation::ReduceOp;
    use proptest::prelude::*;

    fn call(operation: Operation, count: usize) -> CallFingerprint {
        CallFingerprint::new(operation, DType::F32, count)
    }

    #[test]
    fn collectives_and_empty_messages_count_for_nothing() {
        let mut messages = MessageCounts::new(3);
        messages.count(&call(Operation::AllReduce(ReduceOp::Sum), 9), 7);
        messages.count(&call(Operation::Send { to: Rank(2) }, 0), 7);
        assert_eq!(messages.with(2), Exchange::default());
        assert_eq!(PeerSet::of(&call(Operation::Broadcast { root: Rank(3) }, 9)), PeerSet::default());
    }

    #[test]
    fn what_was_left_undone_is_said() {
        let mut messages = MessageCounts::new(3);
        messages.count(&call(Operation::Send { to: Rank(1) }, 10), 2);
        messages.count(&call(Operation::Recv { from: Rank(2) }, 10), 3);
        messages.count(&call(Operation::Recv { from: Rank(1) }, 30), 1);
        let sent = MessageCount { messages: 2, bytes: 80 };
        messages.ended_with(1, Exchange { sent, received: MessageCount { messages: 2, bytes: 84 } });
        messages.ended_with(2, Exchange { sent, received: MessageCount::default() });
        let said: Vec<String> = messages.unmatched().iter().map(ToString::to_string).collect();
        let expected = [
            "after it has sent this rank 2 messages of 80 bytes; this rank receives 1 message of 120 bytes",
            "without sending message 3 to this rank",
            "after it has received 2 messages of 84 bytes from this rank, which sends 2 messages of 80 bytes",
        ];
        assert_eq!(said, expected);
    }

    proptest! {
        /// Two of three ranks, each with its own list of messages by kind and length: the missing counterparts are found, and
        /// nothing else.
        #[test]
        fn what_has_no_counterpart_is_found(
            mine in proptest::collection::vec((any::<bool>(), 1..3usize, 1..3u64), 0..6),
            theirs in proptest::collection::vec((any::<bool>(), 1..3usize, 1..3u64), 0..6),
        ) {
            let (mut me, mut other) = (MessageCounts::new(3), MessageCounts::new(3));
            for (messages, list, peer) in [(&mut me, &mine, Rank(1)), (&mut other, &theirs, Rank(0))] {
                for (is_sent, count, times) in list {
                    let operation =
                        if *is_sent { Operation::Send { to: peer } } else { Operation::Recv { from: peer } };
                    messages.count(&call(operation, *count), *times);
                }
                // This message is not between the two.
                messages.count(&call(Operation::Recv { from: Rank(2) }, 5), 1);
            }
            prop_assert_eq!(me.unmatched(), []);
            me.ended_with(1, other.with(0));
            let all = |list: &[(bool, usize, u64)], is_sent: bool| {
                let list = list.iter().filter(|(sent, ..)| *sent == is_sent);
                list.fold((0, 0), |(messages, bytes), (_, count, times)| {
                    (messages + times, bytes + 4 * *count as u64 * times)
                })
            };
            let differs = |is_sent| {
                let (mine, theirs) = (all(&mine, is_sent), all(&theirs, !is_sent));
                mine.0 > theirs.0 || mine.1 > theirs.1 || mine.0 == theirs.0 && mine.1 != theirs.1
            };
            let found = me.unmatched();
            prop_assert_eq!(found.len(), usize::from(differs(false)) + usize::from(differs(true)));
            prop_assert!(found.iter().all(|unmatched| unmatched.position == 1));
        }

        #[test]
        fn a_set_holds_its_members_by_direction_and_in_groups_of_64_no_others(
            sent in proptest::collection::vec(0..64u32, 0..6),
            received in proptest::collection::vec(0..64u32, 0..6),
            far in 64..1000u32,
        ) {
            let sends = sent.iter().map(|to| call(Operation::Send { to: Rank(*to) }, 1));
            let receipts = received.iter().map(|from| call(Operation::Recv { from: Rank(*from) }, 1));
            let set = sends.chain(receipts).map(|call| PeerSet::of(&call)).fold(PeerSet::default(), PeerSet::union);
            for position in 0..64 {
                prop_assert_eq!(set.may_hold(position as usize, true), sent.contains(&position));
                prop_assert_eq!(set.may_hold(position as usize, false), received.contains(&position));
            }
            let far_too = set.union(PeerSet::of(&call(Operation::Send { to: Rank(far) }, 1)));
            prop_assert!(far_too.may_hold(far as usize, true));
        }
    }
}
