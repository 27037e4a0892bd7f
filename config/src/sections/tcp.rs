//! `[process_group.tcp]`

use super::section;
use crate::{AlgorithmChoice, Segment, SocketBuffer, Timeout};
use std::net::IpAddr;
use std::time::Duration;

section! {
    /// The CPU data plane.
    TcpConfig = "process_group.tcp" {
        /// The network interface whose address peers are told, such as `eth0`; unset, the one that faces the
        /// rendezvous.
        interface: Option<String> = "",
        /// The local address on which peers are accepted; stronger than `process_group.tcp.interface`.
        bind: Option<IpAddr> = "",
        /// How an all-reduce goes.
        algorithm: AlgorithmChoice = "auto",
        /// The size of each socket's send and receive buffers; unset, 256KiB between ranks of one host, where more would
        /// only fall out of the processor's cache, and the kernel's own tuning between hosts. At least 64KiB, about one
        /// packet of the loopback interface: where less fits in, its pieces wait for delayed acknowledgements.
        socket_buffer: Option<SocketBuffer> = "",
        /// The size of a pipelined piece.
        segment: Segment = "128KiB",
        /// Whether ranks of one host copy large payloads from each other's memory, where the system lets them, instead of
        /// sending them through sockets.
        cross_memory: bool = "true",
        /// How long to poll a socket before sleeping on it: lower latency for a busy core; 0s never polls.
        spin: Duration = "50us",
        /// How long a peer's new connection has to introduce itself.
        handshake_timeout: Timeout = "5s",
    }
}
