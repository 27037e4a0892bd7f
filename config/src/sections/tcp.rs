//! `[process_group.tcp]`

use super::section;
use crate::AlgorithmChoice;
use std::net::IpAddr;
use std::time::Duration;

section! {
    /// The CPU data plane.
    TcpConfig = "process_group.tcp" {
        /// The network interface whose address is announced to peers, such as `eth0`; unset, the one that reaches the rendezvous.
        interface: Option<String> = "",
        /// The local address on which peers connect; overrides `process_group.tcp.interface`.
        bind: Option<IpAddr> = "",
        /// The algorithm on CPUs, for every operation that has it.
        algorithm: AlgorithmChoice = "auto",
        /// Exchange data between ranks of one host through shared memory, where the system allows it, instead of sockets.
        shared_memory: bool = "true",
        /// The time to poll for data from other ranks before sleeping: lower latency at the price of a busy core; 0s never polls.
        spin: Duration = "50us",
    }
}
