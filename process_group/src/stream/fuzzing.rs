//! The messages between watchdogs, for the fuzz targets.

use super::control_message::ControlMessage;

/// Decodes a stream of messages, up to the first that is malformed, and encodes each again.
pub(crate) fn messages(mut bytes: &[u8]) {
    while let Ok(Some((message, length))) = ControlMessage::decode(bytes) {
        let _ = message.encode();
        bytes = &bytes[length..];
    }
}
