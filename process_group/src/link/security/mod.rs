//! The [`Handshake`] in which both ends of a connection prove that they know the job's secret, and the protection of the
//! connection after it: none, or TLS 1.3.
//!
//! Both ends send their [`Protection`] in clear, under a MAC of the secret, and continue only if it is the same. Their proofs
//! inside the encrypted channel include the channel's own exported key, its `Binding`, so no third party can intercept and
//! decrypt (decision 0021).

mod channel;
pub(crate) mod handshake;
mod sealed;
mod secured;
mod socket;
mod tls;

use std::net::IpAddr;
use std::{fmt, io};

use ryzanstein_config::{EncryptionChoice, SecurityConfig};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::error::{Error, Result};
pub(crate) use channel::Channel;
pub use handshake::{Accepted, Handshake, HandshakeError, Protocol};
use secured::Binding;
pub use secured::Secured;
pub(crate) use socket::{Connecting, Socket};
use tls::Tls;

/// Counts a rejected connection. `plane` is `control` or `data`.
pub fn count_refused(plane: &'static str, reason: &'static str) {
    metrics::counter!(crate::types::metric_names::REFUSED_CONNECTIONS.name, "plane" => plane, "reason" => reason)
        .increment(1);
}

/// Returns true if TLS failed, not the connection: somebody has changed its bytes, or something else answers at the address.
fn is_of_tls(error: &io::Error) -> bool {
    error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).is_some()
}

/// The protection of the bytes of a connection. Both ends must have the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// The bytes travel in clear.
    Clear,
    /// The bytes are encrypted; the job's secret authenticates the ends.
    Encrypted,
}

impl Protection {
    pub(crate) const ALL: [Self; 2] = [Self::Clear, Self::Encrypted];

    /// Returns its number in handshakes.
    const fn byte(self) -> u8 {
        self as u8
    }

    /// Returns the protection with that number.
    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Clear => "does not encrypt",
            Self::Encrypted => "encrypts",
        })
    }
}

/// The two ends of a connection have different settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "on this connection, this end {here} and the other end {there}; set security.encryption alike on every \
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
    /// Makes a key for this process.
    ///
    /// # Errors
    /// [`Error::Configuration`] when the system gives no random numbers.
    pub fn new(config: &SecurityConfig) -> Result<Self> {
        let tls = Tls::new().map_err(|error| {
            Error::Configuration(format!("no key for encrypted connections could be made: {error}"))
        })?;
        Ok(Self { encryption: config.encryption, tls })
    }

    /// Returns the protection of a connection to this address. Both ends use the address that accepts.
    pub fn protection(&self, accepting: IpAddr) -> Protection {
        if accepting.to_canonical().is_loopback() {
            return self.protection_within_host();
        }
        match self.encryption {
            EncryptionChoice::On | EncryptionChoice::Auto => Protection::Encrypted,
            EncryptionChoice::Off => Protection::Clear,
        }
    }

    /// Returns the protection of a connection whose bytes do not leave the host: through a Unix socket, or between loopback
    /// addresses.
    pub fn protection_within_host(&self) -> Protection {
        match self.encryption {
            EncryptionChoice::On => Protection::Encrypted,
            EncryptionChoice::Off | EncryptionChoice::Auto => Protection::Clear,
        }
    }

    /// Checks that the other end protects the connection as this one does.
    ///
    /// # Errors
    /// A [`Mismatch`] with the protection of each end.
    fn agree(here: Protection, there: Protection) -> Result<(), Mismatch> {
        if here == there { Ok(()) } else { Err(Mismatch { here, there }) }
    }

    /// Protects a connection that this end has made.
    ///
    /// # Errors
    /// When the connection breaks, or its bytes are changed.
    pub(super) async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        protection: Protection,
        stream: S,
    ) -> io::Result<Secured<S>> {
        match protection {
            Protection::Clear => Ok(Secured::clear(stream)),
            Protection::Encrypted => self.tls.connect(stream).await,
        }
    }

    /// Protects a connection that this end has accepted.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        protection: Protection,
        stream: S,
    ) -> io::Result<Secured<S>> {
        match protection {
            Protection::Clear => Ok(Secured::clear(stream)),
            Protection::Encrypted => self.tls.accept(stream).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_encrypts_all_but_connections_to_loopback_addresses() {
        use std::net::{Ipv4Addr, Ipv6Addr};

        let with = |encryption| Security::new(&SecurityConfig { encryption }).unwrap();
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
    fn every_protection_has_a_number_and_no_other_number_has_one() {
        for protection in Protection::ALL {
            assert_eq!(Protection::from_byte(protection.byte()), Some(protection));
        }
        assert_eq!(Protection::from_byte(2), None);
    }
}
