//! Each end of a connection proves that it knows the job's secret, before a word of HTTP/2 is parsed.
//!
//! ```text
//! client → server   magic(8)  client nonce(32)
//! server → client   magic(8)  server nonce(32)  HMAC-SHA256(secret, "server" ‖ both nonces)
//! client → server   HMAC-SHA256(secret, "client" ‖ both nonces)
//! server → client   welcome(1)
//! ```
//!
//! All lengths are fixed, so no byte from an unauthenticated peer becomes a length or an allocation. The secret itself is
//! never sent. Fresh nonces prevent replay, and different labels prevent reflection. What follows the handshake is neither
//! encrypted nor authenticated: an attacker who can change packets can take over a connection.

use hmac::{Hmac, KeyInit, Mac};
use ryzanstein_process_group::Secret;
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Protocol and version.
const MAGIC: [u8; 8] = *b"RYZCTL\x00\x01";
const WELCOME: u8 = 0x06;

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection broke.
    #[error("the connection broke during the handshake: {0}")]
    Io(#[from] std::io::Error),
    /// The other end speaks another protocol, or another version.
    #[error("the server there is not a rendezvous of this version")]
    NotARendezvous,
    /// The other end does not know the secret.
    #[error("the other end does not know this job's secret, so it belongs to another job")]
    WrongSecret,
}

impl HandshakeError {
    /// The reason in metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Io(_) => "broken",
            Self::NotARendezvous => "wrong_version",
            Self::WrongSecret => "wrong_secret",
        }
    }
}

fn mac(secret: &Secret, label: &str, nonces: [&[u8; 32]; 2]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.expose()).expect("HMAC takes keys of any length");
    mac.update(b"ryzanstein control 1 ");
    mac.update(label.as_bytes());
    for nonce in nonces {
        mac.update(nonce);
    }
    mac
}

fn nonce() -> std::io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(std::io::Error::other)?;
    Ok(nonce)
}

/// The server's side.
pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    secret: &Secret,
) -> Result<(), HandshakeError> {
    let mut magic = [0; 8];
    stream.read_exact(&mut magic).await?;
    if magic != MAGIC {
        return Err(HandshakeError::NotARendezvous);
    }
    let mut client = [0; 32];
    stream.read_exact(&mut client).await?;
    let server = nonce()?;
    let mut hello = Vec::with_capacity(72);
    hello.extend_from_slice(&MAGIC);
    hello.extend_from_slice(&server);
    hello.extend_from_slice(&mac(secret, "server", [&client, &server]).finalize().into_bytes());
    stream.write_all(&hello).await?;
    let mut proof = [0; 32];
    stream.read_exact(&mut proof).await?;
    // Compares in constant time.
    mac(secret, "client", [&client, &server])
        .verify_slice(&proof)
        .map_err(|_| HandshakeError::WrongSecret)?;
    stream.write_all(&[WELCOME]).await?;
    Ok(())
}

/// The client's side.
pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    secret: &Secret,
) -> Result<(), HandshakeError> {
    let client = nonce()?;
    let mut hello = MAGIC.to_vec();
    hello.extend_from_slice(&client);
    stream.write_all(&hello).await?;
    let mut magic = [0; 8];
    match stream.read_exact(&mut magic).await {
        Ok(_) if magic == MAGIC => {}
        // It closed the connection on our hello: another protocol, or another version.
        Err(error) if error.kind() != std::io::ErrorKind::UnexpectedEof => return Err(error.into()),
        _ => return Err(HandshakeError::NotARendezvous),
    }
    let (mut server, mut proof) = ([0; 32], [0; 32]);
    stream.read_exact(&mut server).await?;
    stream.read_exact(&mut proof).await?;
    mac(secret, "server", [&client, &server])
        .verify_slice(&proof)
        .map_err(|_| HandshakeError::WrongSecret)?;
    stream.write_all(&mac(secret, "client", [&client, &server]).finalize().into_bytes()).await?;
    let mut welcome = [0];
    stream.read_exact(&mut welcome).await?;
    if welcome == [WELCOME] { Ok(()) } else { Err(HandshakeError::NotARendezvous) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn two_ends_with_the_same_secret_accept_each_other() {
        let (mut a, mut b) = tokio::io::duplex(1024);
        let secret = Secret::random();
        let (server, client) = tokio::join!(accept(&mut a, &secret), connect(&mut b, &secret));
        server.expect("the server accepts");
        client.expect("the client accepts");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_client_with_another_secret_is_told_so() {
        let (mut a, mut b) = tokio::io::duplex(1024);
        let (mine, other) = (Secret::random(), Secret::random());
        let server = async {
            let outcome = accept(&mut a, &mine).await;
            drop(a);
            outcome
        };
        let client = async {
            let outcome = connect(&mut b, &other).await;
            drop(b);
            outcome
        };
        let (server, client) = tokio::join!(server, client);
        assert!(server.is_err());
        assert!(matches!(client, Err(HandshakeError::WrongSecret)));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn another_protocol_is_refused_after_eight_bytes() {
        let (mut a, mut b) = tokio::io::duplex(1024);
        b.write_all(b"GET / HT").await.expect("written");
        assert!(matches!(accept(&mut a, &Secret::random()).await, Err(HandshakeError::NotARendezvous)));
    }
}
