//! `[process_group.tcp]`

use super::section;
use crate::{AlgorithmChoice, Segment, SocketBuffer, Timeout};
use std::net::IpAddr;
use std::time::Duration;

section! {
    /// The CPU data plane.
    TcpConfig = "process_group.tcp" {
        /// The network interface whose address is announced to peers, such as `eth0`; unset, the one that faces the rendezvous.
        interface: Option<String> = "",
        /// The local address on which peers connect; overrides `process_group.tcp.interface`.
        bind: Option<IpAddr> = "",
        /// The all-reduce algorithm. If all ranks are on one host, any value but `auto` keeps links on sockets.
        algorithm: AlgorithmChoice = "auto",
        /// The size of each socket's send and receive buffers; unset, 256KiB between ranks of one host, where more would only
        /// fall out of the CPU cache, and the kernel's auto-tuning between hosts. At least 64KiB: with less, parts of a large packet
        /// wait for delayed acknowledgements. A Unix socket has a send buffer only.
        socket_buffer: Option<SocketBuffer> = "",
        /// The size of a pipelined segment.
        segment: Segment = "128KiB",
        /// Whether ranks of one host exchange data through shared memory, where the system allows it, instead of sockets. If all
        /// ranks are on one host, an `algorithm` other than `auto` keeps them on sockets.
        shared_memory: bool = "true",
        /// How long to look for data from other ranks before sleeping: lower latency at the price of a busy core; 0s never polls.
        spin: Duration = "50us",
        /// How long a peer's new connection has for its handshake.
        handshake_timeout: Timeout = "5s",
    }
}
