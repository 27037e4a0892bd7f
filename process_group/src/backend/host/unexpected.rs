//! Messages between two ranks that arrive before their receiver has asked for them.

use super::link::{Link, Moved};
use crate::wire::frame::Header;

/// Bytes of unexpected messages kept of one peer; beyond, the sender waits.
const LIMIT: usize = 256 << 20;

#[derive(Debug)]
pub(super) struct UnexpectedMessage {
    pub(super) header: Header,
    pub(super) bytes: Vec<u8>,
    /// Bytes that are there.
    filled: usize,
}

impl Link {
    /// Takes in a message that nobody has asked for. `false` when there is no room: then its sender waits.
    pub(super) fn begin_unexpected(&mut self, header: Header) -> bool {
        let held: usize = self.unexpected.iter().map(|message| message.bytes.len()).sum();
        if held > 0 && held + header.length > LIMIT {
            return false;
        }
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(header.length).is_err() {
            return false;
        }
        bytes.resize(header.length, 0);
        self.partial = Some(UnexpectedMessage { header, bytes, filled: 0 });
        true
    }

    /// Reads more of the message begun. `true` once it is whole, or when none was begun.
    pub(super) fn continue_unexpected(&mut self) -> bool {
        let Some(mut message) = self.partial.take() else { return true };
        loop {
            let missing = message.bytes.len() - message.filled;
            let take = missing.min(self.buffered().len());
            message.bytes[message.filled..][..take].copy_from_slice(&self.buffered()[..take]);
            self.consume(take);
            message.filled += take;
            if message.filled == message.bytes.len() {
                self.unexpected.push_back(message);
                return true;
            }
            let Moved::Bytes(bytes) = self.read_into(&mut message.bytes[message.filled..]) else {
                self.partial = Some(message);
                return false;
            };
            message.filled += bytes;
        }
    }
}
