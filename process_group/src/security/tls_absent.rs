//! A build without TLS, in which only connections in clear can be made.

use std::path::Path;

use ryzanstein_config::EncryptionChoice;

use super::{Protection, Secured, SecurityError};

/// The files of `[security]`.
pub(super) struct Files<'a> {
    pub(super) certificate: &'a Path,
    pub(super) key: &'a Path,
    pub(super) ca: &'a Path,
}

#[derive(Clone, Debug)]
pub(super) struct Tls;

impl Tls {
    pub(super) fn new(files: Option<&Files<'_>>, encryption: EncryptionChoice) -> Result<Self, String> {
        if let Some(Files { certificate, key, ca }) = files {
            let all = [certificate, key, ca].map(|path| path.display().to_string()).join(", ");
            return Err(format!("[security] names {all}: {}", SecurityError::Absent));
        }
        if encryption == EncryptionChoice::On {
            return Err(format!("security.encryption is on: {}", SecurityError::Absent));
        }
        Ok(Self)
    }

    #[expect(clippy::unused_self, reason = "as the build with TLS")]
    pub(super) fn protection(&self) -> Protection {
        Protection::Encrypted
    }

    #[expect(clippy::unused_async, reason = "as the build with TLS")]
    pub(super) async fn connect<S>(&self, _: S) -> Result<Secured<S>, SecurityError> {
        Err(SecurityError::Absent)
    }

    #[expect(clippy::unused_async, reason = "as the build with TLS")]
    pub(super) async fn accept<S>(&self, _: S) -> Result<Secured<S>, SecurityError> {
        Err(SecurityError::Absent)
    }
}
