//! Errors of protecting a connection.

use std::io;

/// The reason why a connection could not be protected.
#[derive(Debug, thiserror::Error)]
pub enum SecurityError {
    /// The connection broke.
    #[error(transparent)]
    Io(io::Error),
    /// TLS failed: most often, one end does not accept the other's certificate.
    #[error("{0}")]
    Tls(String),
}

impl From<io::Error> for SecurityError {
    fn from(error: io::Error) -> Self {
        if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            return Self::Tls(words(tls));
        }
        Self::Io(error)
    }
}

/// Explains a TLS error, with its remedy.
fn words(error: &rustls::Error) -> String {
    use rustls::Error::{AlertReceived, InvalidCertificate, NoCertificatesPresented};

    const CERTIFICATES: &str = "check that security.certificate and security.ca fit together on every node, and that no certificate has expired";
    const CHANGED: &str =
        "the bytes of this connection were changed on their way, or something else answers at this address";
    match error {
        AlertReceived(alert) if is_about_certificates(*alert) => format!(
            "the other end ended the TLS handshake ({alert:?}): it does not accept this end's certificate; {CERTIFICATES}"
        ),
        AlertReceived(alert) => format!("the other end ended TLS ({alert:?}): {CHANGED}"),
        InvalidCertificate(_) | NoCertificatesPresented => {
            format!("the TLS handshake failed: {error}; {CERTIFICATES}")
        }
        _ => format!("TLS failed: {error}; {CHANGED}"),
    }
}

const fn is_about_certificates(alert: rustls::AlertDescription) -> bool {
    use rustls::AlertDescription as Alert;

    matches!(
        alert,
        Alert::NoCertificate
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::CertificateRequired
    )
}

#[cfg(test)]
mod tests {
    use rustls::{AlertDescription, CertificateError, Error};

    use super::*;

    #[test]
    fn only_errors_of_certificates_say_to_look_at_certificates() {
        let says = |error: Error| SecurityError::from(io::Error::other(error)).to_string();
        let about = [
            Error::InvalidCertificate(CertificateError::Expired),
            Error::AlertReceived(AlertDescription::UnknownCA),
            Error::NoCertificatesPresented,
        ];
        for error in about {
            let words = says(error);
            assert!(words.contains("security.ca"), "{words}");
        }
        for error in [Error::DecryptError, Error::AlertReceived(AlertDescription::BadRecordMac)] {
            let words = says(error);
            assert!(words.contains("changed on their way") && !words.contains("certificate"), "{words}");
        }
    }
}
