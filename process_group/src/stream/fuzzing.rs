//! The messages between watchdogs, for the fuzz targets.

use super::control_message::{ControlMessage, Malformed};

/// Decodes a stream of messages, up to the first that is malformed. What each is encoded to, if it is not too long to be sent,
/// decodes to a message with the same encoding.
pub(crate) fn messages(mut bytes: &[u8]) {
    while let Ok(Some((message, length))) = ControlMessage::decode(bytes) {
        let again = message.encode();
        match ControlMessage::decode(&again) {
            Err(Malformed::Length(_)) => {}
            read => {
                let (read, taken) = read.expect("well-formed").expect("complete");
                assert_eq!((read.encode(), taken), (again.clone(), again.len()));
            }
        }
        bytes = &bytes[length..];
    }
}
