//! Messages between two ranks that arrive before their receiver has asked for them.

use crate::link::wire::frame::Header;

/// Maximum number of bytes of unexpected messages of one peer; beyond that, the sender waits.
pub(super) const LIMIT: usize = 256 << 20;

#[derive(Debug)]
pub(super) struct UnexpectedMessage {
    pub(super) header: Header,
    pub(super) bytes: Vec<u8>,
    /// Number of bytes that have arrived.
    pub(super) filled: usize,
}
