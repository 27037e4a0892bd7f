//! Messages that stay in their sender's memory: acknowledged by their receiver, and only then released.

use super::Run;
use crate::backend::host::transport::Transport;
use crate::error::{Error, Result};
use crate::mesh::Peer;
use crate::wire::frame::{Header, Kind};

impl<T: Transport> Run<'_, T> {
    /// Acknowledgements come without anything else being expected from the peer.
    pub(super) fn hear_acknowledgements(&mut self, peer: Peer) -> Result<bool> {
        let before = self.progress.peers[peer];
        if before.released == before.sent {
            return Ok(false);
        }
        let heard = self.next_header(peer);
        let now = self.progress.peers[peer];
        // Behind its last word of this call the peer may have left, as it may when it is done.
        let is_done = now.released == now.sent && !self.expects(peer);
        if heard.is_err() && !(is_done && self.links[peer].goodbye) {
            heard?;
        }
        Ok(now.released > before.released)
    }

    /// The peer has read the oldest message that it had not acknowledged.
    pub(super) fn acknowledged(&mut self, peer: Peer, header: &Header) -> Result<()> {
        let progress = &mut self.progress.peers[peer];
        let (at, sent) = (progress.released, progress.sent);
        if header.sequence != self.sequence || at >= sent {
            return Err(self.corrupt(peer, "an acknowledgement of what was not sent"));
        }
        progress.released = at + 1;
        let node = self.compiled.sends[peer][at].node;
        self.progress.done[node] = self.length(node);
        self.finish();
        Ok(())
    }

    /// A message has been received whole. Where it lay in its sender's memory, makes sure that it was still the message, and
    /// lets its sender go on.
    pub(super) fn close_message(&mut self, peer: Peer) -> Result<()> {
        if T::ZERO_COPY {
            // The sender may have given up and closed its socket.
            self.links[peer].look_at_channel();
            self.next_header(peer)?;
            let header = Header { kind: Kind::Acknowledgement, ..self.header(0) };
            let link = &mut self.links[peer];
            link.queue_control(&header, &[]);
            link.flush_control();
        }
        let progress = &mut self.progress.peers[peer];
        progress.open = false;
        progress.received += 1;
        Ok(())
    }

    /// Whether a peer still has to be told something before this rank may leave the call.
    pub(super) fn has_more_to_say(&mut self) -> bool {
        self.links.iter_mut().any(|link| !if T::IN_BAND { link.flush() } else { link.flush_control() })
    }

    /// A payload goes away with its sender: the link says more of that than the transport.
    pub(super) fn unreadable(&mut self, peer: Peer, why: &T::Error) -> Error {
        if !T::IN_BAND
            && let Err(error) = self.next_header(peer)
        {
            return error;
        }
        self.links[peer].closed.get_or_insert_with(|| why.to_string());
        self.lost(peer)
    }
}
