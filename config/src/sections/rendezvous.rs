//! `[rendezvous]`

use super::section;
use crate::{ByteSize, HostPort, LauncherChoice, Timeout};
use std::net::IpAddr;
use std::num::NonZeroU32;

section! {
    /// The rendezvous, where the ranks join the job.
    RendezvousConfig = "rendezvous" {
        /// The address of the rendezvous, HOST:PORT, the same on every node; on a single node, port 0 takes any free port.
        address: Option<HostPort> = "",
        /// The local address on which the rendezvous listens; unset, that of `rendezvous.address`.
        bind: Option<IpAddr> = "",
        /// The launcher whose variables give the rank of a process that `ryz launch` did not start; auto: any launcher that has
        /// set variables.
        launcher: LauncherChoice = "auto",
        /// The maximum time to wait for all ranks to join.
        timeout: Timeout = "1m",
        /// The time limit for a new connection to authenticate, to the rendezvous or between ranks.
        handshake_timeout: Timeout = "5s",
        /// The maximum size of a message.
        max_message: ByteSize = "1MiB",
        /// The maximum number of connections.
        max_connections: NonZeroU32 = "16384",
    }
}
