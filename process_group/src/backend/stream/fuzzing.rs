//! What watchdogs send each other, for the fuzz targets.

use super::control_message::ControlMessage;

/// A stream of messages: each decodes to what encodes to the same message again, up to the first that is malformed.
pub(crate) fn messages(mut bytes: &[u8]) {
    while let Ok(Some((message, length))) = ControlMessage::decode(bytes) {
        let again = message.encode();
        assert_eq!(ControlMessage::decode(&again), Ok(Some((message, again.len()))));
        bytes = &bytes[length..];
    }
}
