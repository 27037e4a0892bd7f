//! `[rendezvous]`

use super::section;
use crate::{ByteSize, HostPort, LauncherChoice, Timeout};
use std::net::IpAddr;
use std::num::NonZeroU32;

section! {
    /// How the ranks find each other.
    RendezvousConfig = "rendezvous" {
        /// The address of the rendezvous, HOST:PORT, the same on every node; on a single node, port 0 takes any free port.
        address: Option<HostPort> = "",
        /// The local address on which the rendezvous listens; unset, that of `rendezvous.address`.
        bind: Option<IpAddr> = "",
        /// The launcher whose variables say which rank a process is, where `ryz launch` did not start it; auto: whichever set some.
        launcher: LauncherChoice = "auto",
        /// How long to wait for all ranks to join.
        timeout: Timeout = "1m",
        /// How long a new connection has to authenticate.
        handshake_timeout: Timeout = "5s",
        /// The maximum size of a message.
        max_message: ByteSize = "1MiB",
        /// The maximum number of connections.
        max_connections: NonZeroU32 = "16384",
    }
}
