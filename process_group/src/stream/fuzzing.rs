//! The messages between watchdogs, for the fuzz targets.

use super::control_message::ControlMessage;

/// Decodes a stream of messages, up to the first that is malformed: the encoding of each decodes to a message with the same
/// encoding. (A text that is not UTF-8 is read with replacements, which are longer, and may be cut when it is sent on.)
pub(crate) fn messages(mut bytes: &[u8]) {
    while let Ok(Some((message, length))) = ControlMessage::decode(bytes) {
        let again = message.encode();
        let (read, taken) = ControlMessage::decode(&again).expect("well-formed").expect("complete");
        assert_eq!((read.encode(), taken), (again.clone(), again.len()));
        bytes = &bytes[length..];
    }
}
