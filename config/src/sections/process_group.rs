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
        /// Whether every path is checked by value before the group is used.
        self_check: bool = "true",
        /// The size of the bucket in which `all_reduce_coalesced` packs small arrays. 0B turns packing off. GPUs never pack.
        coalesce: ByteSize = "25MiB",
        /// Whether GPUs of one node that NVLink connects do all-reduces, all-gathers and reduce-scatters by our own kernels in each
        /// other's memory. They are measured to be faster than NCCL for 2 ranks; for more, `ryz tune` measures it.
        peer_memory: bool = "true",
        /// The measured table of paths: a file of `ryz tune`; auto: the one that `ryz tune --apply` wrote, if it is there and fits this machine; off: none. Rank 0's counts, for all ranks.
        tuning: TuningChoice = "auto",
        [
            /// `[process_group.tcp]`
            tcp: TcpConfig
        ]
    }
}
