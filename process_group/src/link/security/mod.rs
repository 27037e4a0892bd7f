//! Protection of connections after both ends have proved that they know the job's secret: none, or TLS 1.3.
//!
//! Both ends send their [`Protection`] in clear, under a MAC of the secret, and continue only if it is the same. Their proofs
//! inside the encrypted channel include the channel's own exported key, its [`Binding`], so no third party can intercept and
//! decrypt (decision 0021).

mod channel;
mod error;
mod sealed;
mod secured;
mod socket;
mod tls;

use std::fmt;
use std::net::IpAddr;

use ryzanstein_config::{EncryptionChoice, SecurityConfig};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::error::{Error, Result};
pub(crate) use channel::Channel;
pub use error::SecurityError;
pub use secured::{Binding, Secured};
pub(crate) use socket::{Connecting, Socket};
use tls::Tls;

/// Counts a rejected connection. `plane` is `control` or `data`.
pub fn count_refused(plane: &'static str, reason: &'static str) {
    metrics::counter!(crate::types::metric_names::REFUSED_CONNECTIONS.name, "plane" => plane, "reason" => reason)
        .increment(1);
}

/// The protection of the bytes of a connection. Both ends must have the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// The bytes travel in clear.
    Clear,
    /// The bytes are encrypted; the job's secret authenticates the ends.
    Encrypted,
    /// The bytes are encrypted; the job's secret and certificates authenticate the ends.
    Certified,
}

impl Protection {
    const ALL: [Self; 3] = [Self::Clear, Self::Encrypted, Self::Certified];

    /// Returns its number in handshakes.
    pub const fn byte(self) -> u8 {
        self as u8
    }

    /// Returns the protection with that number.
    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Clear => "does not encrypt",
            Self::Encrypted => "encrypts without certificates",
            Self::Certified => "encrypts with certificates",
        })
    }
}

/// The two ends of a connection have different settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "on this connection, this end {here} and the other end {there}; set security.encryption, and the files of [security], alike on every \
     node (`auto` encrypts all but connections to loopback addresses and through Unix sockets; address translation can make an address \
     look different to the two ends: set `on` or `off` there)"
)]
pub struct Mismatch {
    /// The protection of this end.
    pub here: Protection,
    /// The protection of the other end.
    pub there: Protection,
}

/// The settings of `[security]`, ready to protect connections. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Security {
    encryption: EncryptionChoice,
    tls: Tls,
}

impl Security {
    /// Reads the files that the settings name, and makes a key for this process if they name none.
    ///
    /// # Errors
    /// [`Error::Configuration`] with the wrong setting and the reason.
    pub fn new(config: &SecurityConfig) -> Result<Self> {
        let SecurityConfig { encryption, certificate, key, ca } = config;
        let files = match (certificate, key, ca) {
            (Some(certificate), Some(key), Some(ca)) => Some(tls::Files { certificate, key, ca }),
            (None, None, None) => None,
            _ => {
                return Err(Error::Configuration(
                    "security.certificate, security.key and security.ca belong together: set all three, or none".into(),
                ));
            }
        };
        if *encryption == EncryptionChoice::Off && files.is_some() {
            return Err(Error::Configuration(
                "security.encryption is off, so the files of security.certificate, security.key and security.ca would not be \
                 used; unset them, or set it to `on` or `auto`"
                    .into(),
            ));
        }
        let tls = Tls::new(files.as_ref(), *encryption).map_err(Error::Configuration)?;
        Ok(Self { encryption: *encryption, tls })
    }

    /// Returns the protection of a connection to this address. Both ends use the address that accepts.
    pub fn protection(&self, accepting: IpAddr) -> Protection {
        if accepting.to_canonical().is_loopback() {
            return self.protection_within_host();
        }
        match self.encryption {
            EncryptionChoice::On | EncryptionChoice::Auto => self.tls.protection(),
            EncryptionChoice::Off => Protection::Clear,
        }
    }

    /// Returns the protection of a connection whose bytes do not leave the host: through a Unix socket, or between loopback
    /// addresses.
    pub fn protection_within_host(&self) -> Protection {
        match self.encryption {
            EncryptionChoice::On => self.tls.protection(),
            EncryptionChoice::Off | EncryptionChoice::Auto => Protection::Clear,
        }
    }

    /// Checks that the other end protects the connection as this one does.
    ///
    /// # Errors
    /// A [`Mismatch`] with the protection of each end.
    pub fn agree(here: Protection, there: Protection) -> Result<(), Mismatch> {
        if here == there { Ok(()) } else { Err(Mismatch { here, there }) }
    }

    /// Protects a connection that this end has made.
    ///
    /// # Errors
    /// When the connection breaks, or the other end's certificate is not accepted.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        protection: Protection,
        stream: S,
    ) -> Result<Secured<S>, SecurityError> {
        match protection {
            Protection::Clear => Ok(Secured::clear(stream)),
            Protection::Encrypted | Protection::Certified => self.tls.connect(stream).await,
        }
    }

    /// Protects a connection that this end has accepted.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        protection: Protection,
        stream: S,
    ) -> Result<Secured<S>, SecurityError> {
        match protection {
            Protection::Clear => Ok(Secured::clear(stream)),
            Protection::Encrypted | Protection::Certified => self.tls.accept(stream).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_encrypts_all_but_connections_to_loopback_addresses() {
        use std::net::{Ipv4Addr, Ipv6Addr};

        let with =
            |encryption| Security::new(&SecurityConfig { encryption, ..SecurityConfig::default() }).unwrap();
        let loopback: [IpAddr; 3] = [
            Ipv4Addr::LOCALHOST.into(),
            Ipv6Addr::LOCALHOST.into(),
            Ipv4Addr::new(127, 0, 0, 9).to_ipv6_mapped().into(),
        ];
        let other: [IpAddr; 2] =
            [Ipv4Addr::new(10, 0, 0, 1).into(), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into()];
        for address in loopback {
            assert_eq!(with(EncryptionChoice::Auto).protection(address), Protection::Clear);
            assert_eq!(with(EncryptionChoice::Auto).protection_within_host(), Protection::Clear);
            assert_eq!(with(EncryptionChoice::On).protection_within_host(), Protection::Encrypted);
            assert_eq!(with(EncryptionChoice::On).protection(address), Protection::Encrypted);
        }
        for address in other {
            assert_eq!(with(EncryptionChoice::Auto).protection(address), Protection::Encrypted);
            assert_eq!(with(EncryptionChoice::Off).protection(address), Protection::Clear);
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_refused_with_the_setting_that_names_them() {
        let refused = |config: SecurityConfig| Security::new(&config).unwrap_err().to_string();
        let some = |name: &str| Some(std::path::PathBuf::from(name));
        let one = SecurityConfig { certificate: some("c.pem"), ..SecurityConfig::default() };
        assert!(refused(one).contains("belong together"));
        let all = |encryption| SecurityConfig {
            encryption,
            certificate: some("/nonexistent/c.pem"),
            key: some("/nonexistent/k.pem"),
            ca: some("/nonexistent/ca.pem"),
        };
        assert!(refused(all(EncryptionChoice::Off)).contains("would not be used"));
        {
            let words = refused(all(EncryptionChoice::On));
            assert!(words.contains("security.") && words.contains("/nonexistent/"), "{words}");
        }
    }

    #[test]
    fn every_protection_has_a_number_and_no_other_number_has_one() {
        for protection in Protection::ALL {
            assert_eq!(Protection::from_byte(protection.byte()), Some(protection));
        }
        assert_eq!(Protection::from_byte(3), None);
    }
}
