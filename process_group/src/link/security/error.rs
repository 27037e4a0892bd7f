//! Errors of protecting a connection.

use std::io;

/// The reason why a connection could not be protected.
#[derive(Debug, thiserror::Error)]
pub enum SecurityError {
    /// The connection broke.
    #[error(transparent)]
    Io(io::Error),
    /// TLS failed.
    #[error(
        "TLS failed: {0}; the bytes of this connection were changed on their way, or something else answers at this address"
    )]
    Tls(String),
}

impl From<io::Error> for SecurityError {
    fn from(error: io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(tls) => Self::Tls(tls.to_string()),
            None => Self::Io(error),
        }
    }
}
