//! `[rendezvous]`

use super::section;
use crate::{ByteSize, HostPort, Timeout};
use std::net::IpAddr;
use std::num::NonZeroU32;

section! {
    /// How the ranks find each other.
    RendezvousConfig = "rendezvous" {
        /// Where the rendezvous is, HOST:PORT, the same on every node; port 0 takes any free one, which serves one node.
        address: Option<HostPort> = "",
        /// The local address on which the rendezvous listens; unset, the one that `rendezvous.address` names.
        bind: Option<IpAddr> = "",
        /// How long to wait for all ranks to join.
        timeout: Timeout = "1m",
        /// How long a new connection has to prove that it belongs to the job.
        handshake_timeout: Timeout = "5s",
        /// The longest message accepted.
        max_message: ByteSize = "1MiB",
        /// The most connections held at a time.
        max_connections: NonZeroU32 = "16384",
    }
}
