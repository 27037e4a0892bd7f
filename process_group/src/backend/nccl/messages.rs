//! How many messages a rank exchanges with each other one. NCCL does not say that one will never come. So a rank that leaves
//! tells each of the others how many there have been between the two.

use crate::operation::{Operation, Signature};
use crate::rank::Rank;

/// The only rank that a message waits for.
pub(super) fn peer(signature: &Signature) -> Option<Rank> {
    match signature.operation {
        Operation::Send { to } => Some(to),
        Operation::Recv { from } => Some(from),
        _ => None,
    }
}

/// Messages between two members, as one of them counts those it has enqueued.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Tally {
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// Messages with every member.
#[derive(Debug)]
pub(super) struct Messages {
    /// As this rank counts them.
    mine: Vec<Tally>,
    /// As members count those with this rank that exchange no more.
    theirs: Vec<Option<Tally>>,
}

/// A message of this rank's for which the other member has no counterpart, and never will have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unmatched {
    /// The member at this position has not sent what is the message of this number from it.
    Receive(usize, u64),
    /// The member at this position has not received the message of this number to it.
    Send(usize, u64),
}

impl Messages {
    pub(super) fn new(members: usize) -> Self {
        Self { mine: vec![Tally::default(); members], theirs: vec![None; members] }
    }

    /// Counts a call so many times, if it is a message.
    pub(super) fn note(&mut self, signature: &Signature, times: u64) {
        match signature.operation {
            Operation::Send { to } => self.mine[to.index()].sent += times,
            Operation::Recv { from } => self.mine[from.index()].received += times,
            _ => {}
        }
    }

    /// Those with the member at this position, as this rank counts them.
    pub(super) fn with(&self, position: usize) -> Tally {
        self.mine[position]
    }

    /// Takes what a member says that exchanges no more.
    pub(super) fn ended(&mut self, position: usize, tally: Tally) {
        self.theirs[position] = Some(tally);
    }

    /// Every direction between this rank and one that exchanges no more in which a message of this rank has no counterpart, with
    /// the first such message.
    pub(super) fn unmatched(&self) -> impl Iterator<Item = Unmatched> {
        let ended = self.mine.iter().zip(&self.theirs).enumerate();
        ended.filter_map(|(position, (mine, theirs))| Some((position, mine, (*theirs)?))).flat_map(
            |(position, mine, theirs)| {
                let receive = (mine.received > theirs.sent)
                    .then_some(Unmatched::Receive(position, theirs.sent.saturating_add(1)));
                let send = (mine.sent > theirs.received)
                    .then_some(Unmatched::Send(position, theirs.received.saturating_add(1)));
                [receive, send].into_iter().flatten()
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::operation::ReduceOp;
    use proptest::prelude::*;

    fn call(operation: Operation) -> Signature {
        Signature { operation, dtype: DType::F32, count: 1 }
    }

    proptest! {
        /// Rank 0 and rank 1 of three, each with its own list of messages: what the other lacks is found, and nothing else.
        #[test]
        fn what_has_no_counterpart_is_found(
            mine in proptest::collection::vec(any::<bool>(), 0..20),
            theirs in proptest::collection::vec(any::<bool>(), 0..20),
            with_third in 0..5u64,
        ) {
            let (mut me, mut other) = (Messages::new(3), Messages::new(3));
            for (messages, list, peer) in [(&mut me, &mine, Rank(1)), (&mut other, &theirs, Rank(0))] {
                for is_sent in list {
                    let operation =
                        if *is_sent { Operation::Send { to: peer } } else { Operation::Recv { from: peer } };
                    messages.note(&call(operation), 1);
                }
                // Neither counts for the two.
                messages.note(&call(Operation::Recv { from: Rank(2) }), with_third);
                messages.note(&call(Operation::AllReduce(ReduceOp::Sum)), 7);
            }
            prop_assert_eq!(me.unmatched().count(), 0);
            me.ended(1, other.with(0));
            let count = |list: &[bool], is_sent| list.iter().filter(|sent| **sent == is_sent).count() as u64;
            let mut expected = Vec::new();
            if count(&mine, false) > count(&theirs, true) {
                expected.push(Unmatched::Receive(1, count(&theirs, true) + 1));
            }
            if count(&mine, true) > count(&theirs, false) {
                expected.push(Unmatched::Send(1, count(&theirs, false) + 1));
            }
            prop_assert_eq!(me.unmatched().collect::<Vec<_>>(), expected);
        }
    }
}
