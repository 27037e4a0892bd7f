//! Messages between two ranks that arrive before their receiver has asked for them.

use crate::link::wire::frame::Header;

/// Bytes of unexpected messages kept of one peer; beyond, the sender waits.
pub(super) const LIMIT: usize = 256 << 20;

#[derive(Debug)]
pub(super) struct UnexpectedMessage {
    pub(super) header: Header,
    pub(super) bytes: Vec<u8>,
    /// Bytes that are there.
    pub(super) filled: usize,
}
