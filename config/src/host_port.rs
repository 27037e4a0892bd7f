//! Addresses of the form `HOST:PORT`, in which the host may be a name.

use crate::ValueError;
use crate::setting::{Setting, public_setting};

/// A host, by name or address, and a port. Port 0 means any free port.
///
/// ```
/// use ryzanstein_config::HostPort;
///
/// let address: HostPort = "node0.cluster:29500".parse()?;
/// assert_eq!((address.host(), address.port()), ("node0.cluster", 29500));
/// let address: HostPort = "[::1]:0".parse()?;
/// assert_eq!((address.host(), address.port()), ("::1", 0));
/// # Ok::<(), ryzanstein_config::ValueError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    host: String,
    port: u16,
}

impl HostPort {
    /// Creates the address of a port of a host. An IPv6 address is given without brackets.
    pub fn new(host: impl Into<String>, port: u16) -> Result<Self, ValueError> {
        let host = host.into();
        if is_host(&host) { Ok(Self { host, port }) } else { Err(Self::refuse(format!("`{host}`"), None)) }
    }

    /// Returns the name or address. An IPv6 address has no brackets, as resolvers require.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port; 0 means any free port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// Returns true if `host` is an address, or a name that a resolver may know. Only IPv6 addresses contain colons.
fn is_host(host: &str) -> bool {
    if host.contains(':') {
        // A zone (`fe80::1%eth0`) is not part of the address itself.
        return host.split('%').next().is_some_and(|address| address.parse::<std::net::Ipv6Addr>().is_ok());
    }
    !host.is_empty() && host.chars().all(|c| c.is_alphanumeric() || "-._".contains(c))
}

impl Setting for HostPort {
    const EXPECTED: &'static str = "HOST:PORT, with a port from 0 to 65535";
    const EXAMPLE: &'static str = "node0:29500";

    fn read(text: &str) -> Result<Self, Option<String>> {
        let text = text.trim();
        if text.contains("://") {
            return Err(Some("without the scheme".into()));
        }
        if text.parse::<std::net::Ipv6Addr>().is_ok() {
            return Err(Some(format!("an IPv6 address stands in brackets: `[{text}]:29500`")));
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(|| Some("the port is missing".to_owned()))?;
        let host = match host.strip_prefix('[') {
            Some(host) => host.strip_suffix(']').filter(|host| host.contains(':')).ok_or(None)?,
            None if host.contains(':') => return Err(Some("an IPv6 address stands in brackets".into())),
            None => host,
        };
        let port = port.parse().map_err(|_| Some(format!("`{port}` is not a port")))?;
        Self::new(host, port).map_err(|error| error.why)
    }

    fn show(&self) -> String {
        let Self { host, port } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

public_setting!(HostPort);
