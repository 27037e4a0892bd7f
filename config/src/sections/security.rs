//! `[security]`

use super::section;
use crate::EncryptionChoice;
use std::path::PathBuf;

section! {
    /// How connections between the processes of a job are protected, beyond the proof of the job's secret. The same on every node.
    SecurityConfig = "security" {
        /// Whether connections are encrypted: on, off, or auto, which encrypts all but those to loopback addresses and through Unix sockets.
        encryption: EncryptionChoice = "auto",
        /// This process's certificate and those between it and the authority, in a PEM file. With the three files, the two ends of
        /// an encrypted connection also check each other's certificates.
        certificate: Option<PathBuf> = "",
        /// The certificate's private key, in a PEM file.
        key: Option<PathBuf> = "",
        /// The authorities that the certificates of peers must come from, in a PEM file.
        ca: Option<PathBuf> = "",
    }
}
