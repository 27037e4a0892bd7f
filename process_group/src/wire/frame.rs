//! The header before every payload: a fingerprint of the call that the payload belongs to.
//!
//! 48 bytes, little endian: kind, operation, reduction, element type, algorithm, 3 × 0, root u32, rank u32 (who aborted),
//! sequence u64, count u64, payload length u64, address u64.

use crate::call::{Operation, ReduceOp, Signature};
use crate::dtype::DType;
use crate::rank::Rank;
use crate::schedule::Algorithm;

/// Bytes of a header.
pub(crate) const HEADER: usize = 48;
/// Longest reason that travels with an abort.
pub(crate) const MAX_REASON: usize = 2048;

/// What a frame is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Part of a call; the payload follows.
    Data,
    /// The sender has given up; the payload says why, in UTF-8.
    Abort,
    /// "I have waited too long in this call: where are you?"
    Query,
    /// "I am waiting in this call."
    Answer,
    /// The sender leaves in good order.
    Goodbye,
    /// Part of a call; the payload stays in the sender's memory, at `address`, until it is [`Taken`](Self::Taken).
    Offer,
    /// The oldest offer has been read: its memory may be written again.
    Taken,
}

const KINDS: [Kind; 7] =
    [Kind::Data, Kind::Abort, Kind::Query, Kind::Answer, Kind::Goodbye, Kind::Offer, Kind::Taken];

/// A decoded header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) signature: Signature,
    pub(crate) algorithm: Algorithm,
    pub(crate) sequence: u64,
    /// Bytes of the payload.
    pub(crate) length: usize,
    /// Where an offered payload lies in the sender's memory; 0 otherwise.
    pub(crate) address: u64,
    /// The rank that an abort began with.
    pub(crate) rank: Rank,
}

const OPERATIONS: usize = 11;

fn operation_number(operation: Operation) -> u8 {
    match operation {
        Operation::AllReduce(_) => 0,
        Operation::Broadcast { .. } => 1,
        Operation::Reduce { .. } => 2,
        Operation::AllGather => 3,
        Operation::ReduceScatter(_) => 4,
        Operation::Gather { .. } => 5,
        Operation::Scatter { .. } => 6,
        Operation::AllToAll => 7,
        Operation::Send { .. } => 8,
        Operation::Recv { .. } => 9,
        Operation::Barrier => 10,
    }
}

fn operation_from(number: u8, op: ReduceOp, root: Rank) -> Option<Operation> {
    const _: () = assert!(OPERATIONS == 11);
    Some(match number {
        0 => Operation::AllReduce(op),
        1 => Operation::Broadcast { root },
        2 => Operation::Reduce { op, root },
        3 => Operation::AllGather,
        4 => Operation::ReduceScatter(op),
        5 => Operation::Gather { root },
        6 => Operation::Scatter { root },
        7 => Operation::AllToAll,
        8 => Operation::Send { to: root },
        9 => Operation::Recv { from: root },
        10 => Operation::Barrier,
        _ => return None,
    })
}

impl Header {
    /// Bytes that come after the header on the link.
    pub(crate) fn following(&self) -> usize {
        if matches!(self.kind, Kind::Data | Kind::Abort) { self.length } else { 0 }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let Signature { operation, dtype, count } = self.signature;
        let root = match operation {
            Operation::Send { to } => to,
            Operation::Recv { from } => from,
            other => other.root().unwrap_or_default(),
        };
        let mut bytes = [0; HEADER];
        bytes[0] = KINDS.iter().position(|k| *k == self.kind).unwrap_or_default() as u8;
        bytes[1] = operation_number(operation);
        bytes[2] = operation.reduce_op().unwrap_or(ReduceOp::Sum) as u8;
        bytes[3] = dtype as u8;
        bytes[4] = self.algorithm as u8;
        bytes[8..12].copy_from_slice(&root.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.rank.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&(count as u64).to_le_bytes());
        bytes[32..40].copy_from_slice(&(self.length as u64).to_le_bytes());
        bytes[40..48].copy_from_slice(&self.address.to_le_bytes());
        bytes
    }

    /// `None` for bytes that no rank of this version sends.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if bytes[5..8] != [0; 3] {
            return None;
        }
        let op = *ReduceOp::ALL.get(usize::from(bytes[2]))?;
        let length = usize::try_from(u64_at(32)).ok()?;
        let kind = *KINDS.get(usize::from(bytes[0]))?;
        let longest = match kind {
            Kind::Data | Kind::Offer => usize::MAX,
            Kind::Abort => MAX_REASON,
            Kind::Query | Kind::Answer | Kind::Goodbye | Kind::Taken => 0,
        };
        let header = Self {
            kind,
            signature: Signature {
                operation: operation_from(bytes[1], op, Rank(u32_at(8)))?,
                dtype: DType::from_wire(bytes[3])?,
                count: usize::try_from(u64_at(24)).ok()?,
            },
            algorithm: *Algorithm::ALL.get(usize::from(bytes[4]))?,
            sequence: u64_at(16),
            length,
            address: u64_at(40),
            rank: Rank(u32_at(12)),
        };
        (length <= longest).then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_header_of_bytes_decode_to_what_encodes_to_them_again_or_to_nothing(bytes: [u8; HEADER]) {
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(Header::decode(&header.encode()), Some(header));
            }
        }

        #[test]
        fn headers_survive_the_wire(
            operation in 0..OPERATIONS as u8, op in 0..5usize, dtype in 0..10u8, algorithm in 0..4usize,
            root: u32, sequence: u64, count in 0..usize::MAX, length in 0..usize::MAX, address: u64,
        ) {
            let operation = operation_from(operation, ReduceOp::ALL[op], Rank(root)).unwrap();
            let header = Header {
                kind: Kind::Data,
                signature: Signature { operation, dtype: DType::from_wire(dtype).unwrap(), count },
                algorithm: Algorithm::ALL[algorithm],
                sequence,
                length,
                address,
                rank: Rank(0),
            };
            prop_assert_eq!(Header::decode(&header.encode()), Some(header));
        }
    }
}
