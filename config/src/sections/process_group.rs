//! `[process_group]`

use super::{TcpConfig, section};
use crate::{BackendChoice, ByteSize, Timeout, TuningChoice};

section! {
    /// Collectives between ranks.
    ProcessGroupConfig = "process_group" {
        /// The implementation of the collectives.
        backend: BackendChoice = "auto",
        /// The deadline of every collective; the group fails when it passes.
        timeout: Timeout = "5m",
        /// Check the results of every path before the group is used.
        self_check: bool = "true",
        /// The size of the bucket in which `all_reduce_coalesced` packs small arrays. 0B turns packing off. GPUs never pack.
        coalesce: ByteSize = "25MiB",
        /// For GPUs of one node that NVLink connects: use our own kernels, which access the memory of peers, for all-reduces,
        /// all-gathers, reduce-scatters and broadcasts, where they are faster than NCCL; `ryz tune` checks that on this machine.
        peer_memory: bool = "true",
        /// The measured table of paths: a file of `ryz tune`; auto: the table that `ryz tune --apply` wrote, if it exists and
        /// fits this machine; off: none. The value of rank 0 applies to all ranks.
        tuning: TuningChoice = "auto",
        [
            /// `[process_group.tcp]`
            tcp: TcpConfig
        ]
    }
}
