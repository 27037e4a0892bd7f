//! Why a connection could not be protected.

use std::io;

/// Why a connection could not be protected.
#[derive(Debug, thiserror::Error)]
pub enum SecurityError {
    /// The connection broke.
    #[error(transparent)]
    Io(io::Error),
    /// TLS failed: most often, one end does not accept the other's certificate.
    #[error(
        "{0}; check that security.certificate and security.ca fit together on every node, and that no certificate has expired"
    )]
    Tls(String),
    /// This build has no TLS.
    #[error(
        "this connection is to be encrypted, and this program is built without the feature `tls` of \
         ryzanstein-process-group; build with it, or set security.encryption = off on every node"
    )]
    Absent,
}

impl From<io::Error> for SecurityError {
    fn from(error: io::Error) -> Self {
        #[cfg(feature = "tls")]
        if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            return Self::Tls(match tls {
                rustls::Error::AlertReceived(alert) => {
                    format!(
                        "the other end ended the TLS handshake ({alert:?}): it does not accept this end's certificate"
                    )
                }
                other => format!("the TLS handshake failed: {other}"),
            });
        }
        Self::Io(error)
    }
}
