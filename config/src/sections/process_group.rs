//! `[process_group]`

use super::{TcpConfig, section};
use crate::{BackendChoice, ByteSize, Timeout};

section! {
    /// How ranks call collectives.
    ProcessGroupConfig = "process_group" {
        /// Which implementation carries the collectives.
        backend: BackendChoice = "auto",
        /// The deadline of any collective, after which its group is given up.
        timeout: Timeout = "5m",
        /// Whether each path is tried by value before the group is handed over.
        self_check: bool = "true",
        /// The size of the bucket in which small arrays are put together before they are sent; 0B sends each by itself. On GPUs nothing is packed.
        coalesce: ByteSize = "25MiB",
        [
            /// `[process_group.tcp]`
            tcp: TcpConfig
        ]
    }
}
