//! The messages between the watchdogs of a group, and their encoding.
//!
//! | bytes | field |
//! |---|---|
//! | 1 | kind |
//! | 3 | zero |
//! | 4 | length of the payload |
//! | 8 | a number: of a call, or of messages sent |
//! | … | payload: a text, a digest, counts, or call fingerprints of 16 bytes each |
//!
//! Numbers are little endian.

use super::call_log::LogHead;
use super::messages::{Exchange, MessageCount};
use crate::link::wire::fingerprint;
use crate::types::operation::CallFingerprint;

const HEADER: usize = 16;
/// Maximum length of a payload.
pub(super) const MAX_PAYLOAD: usize = 2048;
/// Maximum number of calls in one message.
pub(super) const MAX_CALLS: usize = MAX_PAYLOAD / fingerprint::BYTES;

/// A message from one watchdog to another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ControlMessage {
    /// The sender is running, and makes its communicator.
    Hello,
    /// The sender has left in good order.
    Goodbye,
    /// The number of collectives that the sender has called.
    Progress(u64),
    /// The sender gives up: the collectives that it waited for, up to this one, have not completed. Every member answers with its
    /// progress.
    Expired(u64, String),
    /// The sender gives up, for this reason.
    Aborted(String),
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
        let (kind, number, payload): (u8, u64, &[u8]) = match self {
            Self::Goodbye => (1, 0, &[]),
            Self::Progress(sequence) => (2, *sequence, &[]),
            Self::Expired(sequence, reason) => (3, *sequence, truncate(reason)),
            Self::Aborted(reason) => (4, 0, truncate(reason)),
            Self::Hello => (5, 0, &[]),
            Self::Ping => (10, 0, &[]),
            Self::Pong => (11, 0, &[]),
            Self::Head(head) => (6, head.sequence, &head.digest.to_le_bytes()),
            Self::LastHead(head) => (8, head.sequence, &head.digest.to_le_bytes()),
            Self::Exchanged(Exchange { sent, received }) => {
                let rest = [sent.bytes, received.messages, received.bytes];
                (9, sent.messages, &rest.map(u64::to_le_bytes).concat())
            }
            Self::Calls(first, calls) => {
                (7, *first, &calls.iter().flat_map(fingerprint::pack).collect::<Vec<_>>())
            }
        };
        let mut bytes = vec![kind, 0, 0, 0];
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(number.to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    /// Returns the first message in the received bytes, and its length; none if it is not complete yet.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, Malformed> {
        let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
        let kind = header[0];
        let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        if length > MAX_PAYLOAD {
            return Err(Malformed::Length(length));
        }
        let Some(payload) = bytes.get(HEADER..HEADER + length) else { return Ok(None) };
        let text = || String::from_utf8_lossy(payload).into_owned();
        let number = header[8..].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        let malformed = Malformed::Kind(kind);
        let message = match kind {
            1 => Self::Goodbye,
            2 => Self::Progress(number),
            3 => Self::Expired(number, text()),
            4 => Self::Aborted(text()),
            5 => Self::Hello,
            10 => Self::Ping,
            11 => Self::Pong,
            6 | 8 => {
                let digest = u64::from_le_bytes(payload.try_into().map_err(|_| malformed)?);
                let head = LogHead { sequence: number, digest };
                if kind == 6 { Self::Head(head) } else { Self::LastHead(head) }
            }
            7 => {
                let (calls, rest) = payload.as_chunks();
                let calls = calls.iter().map(fingerprint::unpack).collect::<Option<_>>();
                Self::Calls(number, calls.filter(|_| rest.is_empty()).ok_or(malformed)?)
            }
            9 => {
                let (numbers, rest) = payload.as_chunks();
                let (&[sent, messages, bytes], []) = (numbers, rest) else { return Err(malformed) };
                let [sent, messages, bytes] = [sent, messages, bytes].map(u64::from_le_bytes);
                Self::Exchanged(Exchange {
                    sent: MessageCount { messages: number, bytes: sent },
                    received: MessageCount { messages, bytes },
                })
            }
            _ => return Err(malformed),
        };
        Ok(Some((message, HEADER + length)))
    }
}

/// Bytes that no rank of this version sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Malformed {
    #[error("it announced a control message of {0} bytes; at most {MAX_PAYLOAD} are sent")]
    Length(usize),
    #[error("it sent a control message of kind {0} that no rank of this version sends")]
    Kind(u8),
}

/// Returns the part of a text that is sent.
fn truncate(text: &str) -> &[u8] {
    let mut end = text.len().min(MAX_PAYLOAD);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text.as_bytes()[..end]
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::types::dtype::DType;
    use crate::types::operation::Operation;
    use proptest::prelude::*;

    /// Returns one message of each kind, short and of maximum length.
    pub(in crate::stream) fn one_of_each() -> Vec<ControlMessage> {
        let call = CallFingerprint { operation: Operation::Barrier, dtype: DType::U8, count: 0 };
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
            ControlMessage::Aborted("ä".repeat(MAX_PAYLOAD / 2)),
        ]
    }

    #[test]
    fn every_message_survives_the_wire_and_half_of_one_is_waited_for() {
        for message in one_of_each() {
            let bytes = message.encode();
            assert_eq!(ControlMessage::decode(&bytes), Ok(Some((message, bytes.len()))));
            assert_eq!(ControlMessage::decode(&bytes[..bytes.len() - 1]), Ok(None));
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let sent = ControlMessage::Aborted("ä".repeat(MAX_PAYLOAD)).encode();
        let received = ControlMessage::decode(&sent).unwrap().unwrap().0;
        assert_eq!(received, ControlMessage::Aborted("ä".repeat(MAX_PAYLOAD / 2)));
    }

    #[test]
    fn malformed_messages_are_refused() {
        assert_eq!(ControlMessage::decode(&[12; 15]), Ok(None));
        assert_eq!(
            ControlMessage::decode(&[12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            Err(Malformed::Kind(12))
        );
        assert!(matches!(ControlMessage::decode(&[255; 16]), Err(Malformed::Length(_))));
        // Numbers with too few and too many bytes, and half a call.
        for (kind, length) in [(6, 4), (7, 8), (8, 9), (9, 0), (9, 8), (9, 16)] {
            let mut bytes = [0; 32];
            (bytes[0], bytes[4]) = (kind, length);
            assert_eq!(ControlMessage::decode(&bytes), Err(Malformed::Kind(kind)));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = ControlMessage::decode(&bytes);
        }
    }
}
