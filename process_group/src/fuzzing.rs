//! The decoders of this crate for the fuzz targets. Not part of the API: it may change at any time.

use crate::link::wire::frame::{HEADER, Header};
use crate::stream::fuzzing as control;

/// Decodes consecutive headers of the data plane: each decodes to a value that encodes to it again, or to nothing.
pub fn frames(bytes: &[u8]) {
    for bytes in bytes.as_chunks::<HEADER>().0 {
        let Some(header) = Header::decode(bytes) else { continue };
        assert_eq!(Header::decode(&header.encode()), Some(header));
    }
}

/// Decodes the messages between the watchdogs of a group, as a stream.
pub fn control_messages(bytes: &[u8]) {
    control::messages(bytes);
}
