//! Mutual authentication of a connection: each end proves that it knows the job's secret, before any HTTP/2 is parsed, and
//! again inside the encrypted channel, if there is one.
//!
//! ```text
//! client → server   "RYZCTL" version protection  nonce(32)                                          40 bytes
//! server → client   "RYZCTL" version protection  nonce(32)  HMAC("server" ‖ both openings)           72 bytes
//! client → server   HMAC("client" ‖ both openings)                                                  32 bytes
//!                   TLS 1.3, if both ends say that they encrypt
//! client → server   HMAC("client channel" ‖ both openings ‖ binding)                                32 bytes
//! server → client   HMAC("server channel" ‖ both openings ‖ binding)                                32 bytes
//! ```
//!
//! HMAC is HMAC-SHA-256 with the secret; an opening is the first 40 bytes of an end. All lengths are fixed, so no byte from an
//! unauthenticated peer becomes a length or an allocation. The secret itself is never sent. Fresh nonces prevent replay, and
//! different labels prevent reflection. The binding is the channel's own exported key: an attacker in the middle who decrypts
//! has two channels with different keys, so neither end accepts the other's proof.

use hmac::{Hmac, KeyInit, Mac};
use ryzanstein_process_group::security::{Binding, Mismatch, Protection, Secured, Security, is_of_tls};
use ryzanstein_process_group::{AdmissionToken, Secret};
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Magic number of the protocol, and its version.
const MAGIC: [u8; 7] = *b"RYZCTL\x03";

/// The reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection broke.
    #[error("the connection broke during the handshake: {0}")]
    Io(std::io::Error),
    /// The other end speaks another protocol, or another version.
    #[error("the server there is not a rendezvous of this version")]
    NotARendezvous,
    /// The server closed the connection after our opening: it speaks another protocol or version, or strangers flood it.
    #[error("the server there is not a rendezvous of this version, or too many clients connect to it")]
    Closed,
    /// The other end does not know the secret.
    #[error("the other end does not know this job's secret, so it belongs to another job")]
    WrongSecret,
    /// The other end closed the connection where its proof of the secret was due.
    #[error("the other end hung up instead of proving that it knows this job's secret")]
    NoProof,
    /// The other end's proof is for another connection.
    #[error(
        "the other end's proof of the job's secret is for another connection: somebody in the network between the two ends has \
         taken this one over"
    )]
    Intercepted,
    /// The two ends have different settings.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// The connection could not be encrypted.
    #[error(
        "TLS failed: {0}; the bytes of this connection were changed on their way, or something else answers at this address"
    )]
    Tls(std::io::Error),
}

impl From<std::io::Error> for HandshakeError {
    fn from(error: std::io::Error) -> Self {
        if is_of_tls(&error) { Self::Tls(error) } else { Self::Io(error) }
    }
}

impl HandshakeError {
    /// Returns the reason in one word, for the counter of refused connections.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Io(_) => "broken",
            Self::NotARendezvous | Self::Closed => "protocol",
            Self::WrongSecret | Self::NoProof => "secret",
            Self::Intercepted => "intercepted",
            Self::Mismatch(_) => "encryption",
            Self::Tls(_) => "tls",
        }
    }

    /// Returns true if the other end has proved that it knows the secret.
    pub const fn is_of_a_member(&self) -> bool {
        matches!(self, Self::Intercepted | Self::Mismatch(_) | Self::Tls(_))
    }
}

/// The first message of an end.
type Opening = [u8; 40];

fn opening(protection: Protection) -> std::io::Result<Opening> {
    let mut bytes = [0; 40];
    bytes[..7].copy_from_slice(&MAGIC);
    bytes[7] = protection.byte();
    getrandom::fill(&mut bytes[8..]).map_err(std::io::Error::other)?;
    Ok(bytes)
}

/// Returns the protection that the other end uses for the connection.
fn read_preface(bytes: [u8; 8]) -> Result<Protection, HandshakeError> {
    let protection = (bytes[..7] == MAGIC).then(|| Protection::from_byte(bytes[7])).flatten();
    protection.ok_or(HandshakeError::NotARendezvous)
}

/// The openings of the two ends, and the secret that they prove.
struct Proofs<'a> {
    secret: &'a Secret,
    client: Opening,
    server: Opening,
}

impl Proofs<'_> {
    fn mac(&self, label: &str, binding: Option<&Binding>) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(self.secret.expose()).expect("HMAC takes keys of any length");
        mac.update(b"ryzanstein control 3 ");
        mac.update(label.as_bytes());
        mac.update(&self.client);
        mac.update(&self.server);
        mac.update(binding.map_or(&[], |binding| binding.as_slice()));
        mac
    }

    fn make(&self, label: &str, binding: Option<&Binding>) -> [u8; 32] {
        self.mac(label, binding).finalize().into_bytes().into()
    }

    /// Verifies a proof in constant time.
    fn is_right(&self, label: &str, binding: Option<&Binding>, proof: &[u8; 32]) -> bool {
        self.mac(label, binding).verify_slice(proof).is_ok()
    }
}

/// Runs the server's side. `protection` is that of the address that accepts. A client that knows the secret leaves its
/// admission.
pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    secret: &Secret,
    security: &Security,
    protection: Protection,
    admission: &AdmissionToken,
) -> Result<Secured<S>, HandshakeError> {
    let mut client = [0; 40];
    let (preface, nonce) = client.split_first_chunk_mut::<8>().expect("an opening is longer");
    stream.read_exact(preface).await?;
    let there = read_preface(*preface)?;
    stream.read_exact(nonce).await?;
    let proofs = Proofs { secret, client, server: opening(protection)? };
    stream.write_all(&[&proofs.server[..], &proofs.make("server", None)].concat()).await?;
    let mut proof = [0; 32];
    stream.read_exact(&mut proof).await.map_err(|error| match error.kind() {
        // The client finds the server's proof wrong and disconnects.
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => HandshakeError::NoProof,
        _ => error.into(),
    })?;
    if !proofs.is_right("client", None, &proof) {
        return Err(HandshakeError::WrongSecret);
    }
    admission.leave();
    Security::agree(protection, there)?;

    let mut stream = security.accept(protection, stream).await?;
    let binding = *stream.binding();
    stream.read_exact(&mut proof).await?;
    if !proofs.is_right("client channel", Some(&binding), &proof) {
        return Err(HandshakeError::Intercepted);
    }
    stream.write_all(&proofs.make("server channel", Some(&binding))).await?;
    stream.flush().await?;
    Ok(stream)
}

/// Runs the client's side. `protection` is that of the address it has connected to.
pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    secret: &Secret,
    security: &Security,
    protection: Protection,
) -> Result<Secured<S>, HandshakeError> {
    let client = opening(protection)?;
    stream.write_all(&client).await?;
    let (mut server, mut proof) = ([0; 40], [0; 32]);
    let (preface, nonce) = server.split_first_chunk_mut::<8>().expect("an opening is longer");
    let there = match stream.read_exact(preface).await {
        Ok(_) => read_preface(*preface)?,
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            return Err(HandshakeError::Closed);
        }
        Err(error) => return Err(error.into()),
    };
    stream.read_exact(nonce).await?;
    stream.read_exact(&mut proof).await?;
    let proofs = Proofs { secret, client, server };
    if !proofs.is_right("server", None, &proof) {
        return Err(HandshakeError::WrongSecret);
    }
    // Also to a server with other settings, which can then report them too.
    stream.write_all(&proofs.make("client", None)).await?;
    Security::agree(protection, there)?;

    let mut stream = security.connect(protection, stream).await?;
    let binding = *stream.binding();
    stream.write_all(&proofs.make("client channel", Some(&binding))).await?;
    stream.flush().await?;
    stream.read_exact(&mut proof).await?;
    if proofs.is_right("server channel", Some(&binding), &proof) {
        Ok(stream)
    } else {
        Err(HandshakeError::Intercepted)
    }
}

#[cfg(test)]
mod tests {
    use ryzanstein_config::SecurityConfig;

    use super::*;

    fn security() -> Security {
        Security::new(&SecurityConfig::default()).expect("settings")
    }

    #[tokio::test(flavor = "current_thread")]
    async fn two_ends_with_the_same_secret_accept_each_other() {
        let (secret, security, admission) = (Secret::random(), security(), AdmissionToken::default());
        for protection in [Protection::Clear, Protection::Encrypted] {
            let (a, b) = tokio::io::duplex(1024);
            let (server, client) = tokio::join!(
                accept(a, &secret, &security, protection, &admission),
                connect(b, &secret, &security, protection)
            );
            let (mut server, mut client) = (server.expect("accepted"), client.expect("accepted"));
            assert_eq!(server.binding(), client.binding());
            assert_eq!(*server.binding() == [0; 32], protection == Protection::Clear);
            client.write_all(b"a word").await.expect("written");
            client.flush().await.expect("sent");
            let mut word = [0; 6];
            server.read_exact(&mut word).await.expect("read");
            assert_eq!(&word, b"a word");
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_client_with_another_secret_is_told_so() {
        let (a, b) = tokio::io::duplex(1024);
        let (mine, other, security) = (Secret::random(), Secret::random(), security());
        let admission = AdmissionToken::default();
        let (server, client) = tokio::join!(
            accept(a, &mine, &security, Protection::Encrypted, &admission),
            connect(b, &other, &security, Protection::Encrypted)
        );
        assert!(matches!(server, Err(HandshakeError::NoProof)), "{server:?}");
        assert!(matches!(client, Err(HandshakeError::WrongSecret)));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn two_ends_of_which_one_encrypts_both_say_which() {
        let (secret, security, admission) = (Secret::random(), security(), AdmissionToken::default());
        for (here, there) in
            [(Protection::Clear, Protection::Encrypted), (Protection::Encrypted, Protection::Clear)]
        {
            let (a, b) = tokio::io::duplex(1024);
            let (server, client) = tokio::join!(
                accept(a, &secret, &security, here, &admission),
                connect(b, &secret, &security, there)
            );
            let (server, client) = (server.expect_err("refused"), client.expect_err("refused"));
            assert!(
                matches!(server, HandshakeError::Mismatch(m) if m == Mismatch { here, there }),
                "{server}"
            );
            assert!(
                matches!(client, HandshakeError::Mismatch(m) if m.here == there && m.there == here),
                "{client}"
            );
            assert!(client.to_string().contains("security.encryption"), "{client}");
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn another_protocol_is_refused_after_eight_bytes() {
        let (a, mut b) = tokio::io::duplex(1024);
        b.write_all(b"GET / HT").await.expect("written");
        let refused =
            accept(a, &Secret::random(), &security(), Protection::Clear, &AdmissionToken::default()).await;
        assert!(matches!(refused, Err(HandshakeError::NotARendezvous)));
    }

    /// Forwards the proofs, in the middle between two encrypted channels.
    #[tokio::test(flavor = "current_thread")]
    async fn somebody_in_between_who_decrypts_is_refused_by_both_ends() {
        let (secret, security, admission) = (Secret::random(), security(), AdmissionToken::default());
        let (a, mut towards_client) = tokio::io::duplex(4096);
        let (b, mut towards_server) = tokio::io::duplex(4096);
        let middle = async {
            let mut pass = [0; 72];
            towards_client.read_exact(&mut pass[..40]).await.unwrap();
            towards_server.write_all(&pass[..40]).await.unwrap();
            towards_server.read_exact(&mut pass).await.unwrap();
            towards_client.write_all(&pass).await.unwrap();
            towards_client.read_exact(&mut pass[..32]).await.unwrap();
            towards_server.write_all(&pass[..32]).await.unwrap();
            // A separate end on each side, with its own key.
            let own = self::tests::security();
            let (client, server) = tokio::join!(
                own.accept(Protection::Encrypted, towards_client),
                own.connect(Protection::Encrypted, towards_server)
            );
            let (mut client, mut server) =
                (client.expect("the client starts TLS"), server.expect("so does the server"));
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        };
        let client = async {
            let outcome = connect(a, &secret, &security, Protection::Encrypted).await;
            outcome.map(drop).expect_err("refused")
        };
        let server = async {
            let outcome = accept(b, &secret, &security, Protection::Encrypted, &admission).await;
            outcome.map(drop).expect_err("refused")
        };
        let ((), client, server) = tokio::join!(middle, client, server);
        assert!(matches!(server, HandshakeError::Intercepted), "{server}");
        // The server disconnects from the client before it answers.
        assert!(matches!(client, HandshakeError::Io(_) | HandshakeError::Intercepted), "{client}");
    }
}
