//! `[security]`

use super::section;
use crate::EncryptionChoice;
use std::path::PathBuf;

section! {
    /// Protection of the connections between the processes of a job, in addition to the proof of the job's secret. The same on
    /// every node.
    SecurityConfig = "security" {
        /// The encryption of connections: on, off, or auto, which encrypts all except those to loopback addresses and through
        /// Unix sockets.
        encryption: EncryptionChoice = "auto",
        /// The certificate of this process, with the intermediate certificates up to the authority, in a PEM file. With the three
        /// files, both ends of an encrypted connection also verify each other's certificates.
        certificate: Option<PathBuf> = "",
        /// The certificate's private key, in a PEM file.
        key: Option<PathBuf> = "",
        /// The authorities that issue the certificates of peers, in a PEM file.
        ca: Option<PathBuf> = "",
    }
}
