//! The messages between the watchdogs of a group, and their encoding: the length in four bytes, little endian, then MessagePack.

use serde::{Deserialize, Serialize, Serializer};

use super::call_log::LogHead;
use super::messages::Exchange;
use crate::types::operation::CallFingerprint;

const HEADER: usize = 4;
/// Maximum length of a message behind its header.
const MAX_BYTES: usize = 16 << 10;
/// Maximum length of a reason, in bytes.
const MAX_REASON: usize = 2048;
/// Maximum number of calls in one message.
pub(super) const MAX_CALLS: usize = 128;

/// A message from one watchdog to another.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum ControlMessage {
    /// The sender is running, and makes its communicator.
    Hello,
    /// The sender has left in good order.
    Goodbye,
    /// The number of collectives that the sender has called.
    Progress(u64),
    /// The sender gives up: the collectives that it waited for, up to this one, have not completed. Every member answers with its
    /// progress.
    Expired(u64, #[serde(serialize_with = "truncated")] String),
    /// The sender gives up, for this reason.
    Aborted(#[serde(serialize_with = "truncated")] String),
    /// The head of the sender's log.
    Head(LogHead),
    /// The head of the sender's log; the sender makes no more calls.
    LastHead(LogHead),
    /// The messages between the sender, which sends and receives no more, and the receiver of this message.
    Exchanged(Exchange),
    /// The sender's collectives from this number on: because some call differs, or because the sender leaves.
    Calls(u64, Vec<CallFingerprint>),
    /// The sender waits, and asks whether the receiver responds.
    Ping,
    /// The answer.
    Pong,
}

impl ControlMessage {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        rmp_serde::encode::write(&mut bytes, self).expect("numbers, texts and calls can be encoded");
        let length = (bytes.len() - HEADER) as u32;
        bytes[..HEADER].copy_from_slice(&length.to_le_bytes());
        bytes
    }

    /// Returns the first message in the received bytes, and its length; none if it is not complete yet.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, Malformed> {
        let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
        let length = u32::from_le_bytes(*header) as usize;
        if length > MAX_BYTES {
            return Err(Malformed::Length(length));
        }
        let Some(message) = bytes.get(HEADER..HEADER + length) else { return Ok(None) };
        Ok(Some((rmp_serde::from_slice(message)?, HEADER + length)))
    }
}

/// Bytes that no rank of this version sends.
#[derive(Debug, thiserror::Error)]
pub(super) enum Malformed {
    #[error("it announced a control message of {0} bytes; at most {MAX_BYTES} are sent")]
    Length(usize),
    #[error("it sent a control message that no rank of this version sends: {0}")]
    Message(#[from] rmp_serde::decode::Error),
}

/// Encodes the part of a reason that is sent.
fn truncated<S: Serializer>(reason: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&reason[..reason.floor_char_boundary(MAX_REASON)])
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::stream::messages::MessageCount;
    use crate::types::dtype::DType;
    use crate::types::operation::{Operation, ReduceOp};
    use crate::types::rank::Rank;
    use proptest::prelude::*;

    /// Returns one message of each kind, short and of maximum length.
    pub(in crate::stream) fn one_of_each() -> Vec<ControlMessage> {
        let operation = Operation::Reduce { op: ReduceOp::Product, root: Rank(u32::MAX) };
        let call = CallFingerprint::new(operation, DType::BF16, usize::MAX);
        vec![
            ControlMessage::Hello,
            ControlMessage::Goodbye,
            ControlMessage::Ping,
            ControlMessage::Pong,
            ControlMessage::Progress(u64::MAX - 1),
            ControlMessage::Head(LogHead { sequence: 3, digest: u64::MAX - 5 }),
            ControlMessage::LastHead(LogHead { sequence: 4, digest: 1 }),
            ControlMessage::Exchanged(Exchange {
                sent: MessageCount { messages: 3, bytes: 1 << 40 },
                received: MessageCount { messages: 2, bytes: u64::MAX - 2 },
            }),
            ControlMessage::Calls(9, vec![call; MAX_CALLS]),
            ControlMessage::Expired(7, "call 7 took too long".into()),
            ControlMessage::Aborted("ä".repeat(MAX_REASON / 2)),
        ]
    }

    #[test]
    fn every_message_survives_the_wire_and_half_of_one_is_waited_for() {
        for message in one_of_each() {
            let bytes = message.encode();
            assert_eq!(ControlMessage::decode(&bytes).unwrap(), Some((message, bytes.len())));
            assert_eq!(ControlMessage::decode(&bytes[..bytes.len() - 1]).unwrap(), None);
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let sent = ControlMessage::Aborted("ä".repeat(MAX_REASON)).encode();
        let received = ControlMessage::decode(&sent).unwrap().unwrap().0;
        assert_eq!(received, ControlMessage::Aborted("ä".repeat(MAX_REASON / 2)));
    }

    #[test]
    fn malformed_messages_are_refused() {
        let decoded = |bytes: &[u8]| ControlMessage::decode(bytes).map_err(|malformed| malformed.to_string());
        assert_eq!(decoded(&[255; 3]), Ok(None));
        let error = decoded(&[255; 4]).unwrap_err();
        assert!(error.contains("4294967295 bytes; at most 16384"), "{error}");
        let mut bytes = ControlMessage::Progress(3).encode();
        bytes[HEADER + 2] = b'Q';
        let error = decoded(&bytes).unwrap_err();
        assert!(error.contains("that no rank of this version sends: unknown variant"), "{error}");
        // A message that ends before its fields do.
        let mut bytes = ControlMessage::Head(LogHead { sequence: 3, digest: u64::MAX }).encode();
        bytes.pop();
        bytes[0] -= 1;
        assert!(decoded(&bytes).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = ControlMessage::decode(&bytes);
        }
    }
}
