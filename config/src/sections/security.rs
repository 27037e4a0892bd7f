//! `[security]`

use super::section;
use crate::EncryptionChoice;

section! {
    /// Protection of the connections between the processes of a job, in addition to the proof of the job's secret. The same on
    /// every node.
    SecurityConfig = "security" {
        /// The encryption of connections: on, off, or auto, which encrypts all except those to loopback addresses and through
        /// Unix sockets.
        encryption: EncryptionChoice = "auto",
    }
}
