//! The beginning of every connection of a job: both ends prove that they know its secret before either trusts any other byte,
//! and again at the end of the handshake, inside the encrypted channel if there is one.
//!
//! ```text
//! client → server   magic(6) version protection nonce(32)                                   40 bytes
//! server → client   magic(6) version protection nonce(32)  mac("server")                    72 bytes
//! client → server   mac("client")                                                           32 bytes
//!                   TLS 1.3, if both ends say that they encrypt
//! client → server   hello(n) mac("client channel", binding, hello)                          n + 32 bytes
//! server → client   mac("server channel", binding, hello)                                   32 bytes
//! ```
//!
//! `mac` is HMAC-SHA-256 with the secret, over the label, the client's opening, the server's (the first 40 bytes of each end) and
//! what else is in brackets, in this order.
//! All lengths are fixed, so no byte from an unauthenticated peer becomes a length or an allocation. The secret itself is never
//! sent. Fresh nonces prevent replay, different labels prevent reflection, and the magic keeps the protocols apart. The binding is
//! the channel's own exported key: an attacker in the middle who decrypts has two channels with different keys, so neither end
//! accepts the other's proof. The client speaks first, so another kind of server shows itself at once.

use std::io;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{Mismatch, Protection, Secured, Security, is_of_tls};
use crate::membership::half_open::AdmissionToken;
use crate::membership::roster::Secret;

/// The beginning of every protocol's magic number.
const FAMILY: &[u8] = b"RYZ";
/// Length of what comes before a nonce.
const PREFACE: usize = 8;
/// Length of an end's first message, without its proof.
pub(crate) const OPENING: usize = 40;
/// Length of a proof.
pub(crate) const PROOF: usize = 32;

type Opening = [u8; OPENING];
type Proof = [u8; PROOF];

/// A protocol whose connections begin with the handshake. Two versions of a protocol refuse each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// Between a rank and the rendezvous.
    Control,
    /// Between two ranks: everything in `link::wire`, and the messages between watchdogs.
    Data,
}

impl Protocol {
    /// Returns the magic number with the version.
    const fn magic(self) -> [u8; PREFACE - 1] {
        match self {
            Self::Control => *b"RYZCTL\x05",
            Self::Data => *b"RYZLNK\x10",
        }
    }

    const fn server(self) -> &'static str {
        match self {
            Self::Control => "rendezvous",
            Self::Data => "rank",
        }
    }
}

/// The reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection broke.
    #[error("the connection broke during the handshake: {0}")]
    Io(io::Error),
    /// The other end speaks another protocol, or another version.
    #[error("the server there is not a {} of this version", .0.server())]
    OtherProtocol(Protocol),
    /// The server closed the connection after our opening: it speaks another protocol or version, has ended, or strangers flood it.
    #[error("the server there is not a {} of this version, has just ended, or has too many clients", .0.server())]
    Closed(Protocol),
    /// The other end does not know the secret.
    #[error("the other end does not know this job's secret, so it belongs to another job")]
    WrongSecret,
    /// The client closed the connection where its proof of the secret was due.
    #[error("the other end hung up instead of proving that it knows this job's secret")]
    NoProof,
    /// The server closed the connection after our proof of the secret.
    #[error("the other end hung up after this end had proved itself: it has ended, or refuses this one")]
    Refused,
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
    Tls(io::Error),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        if is_of_tls(&error) { Self::Tls(error) } else { Self::Io(error) }
    }
}

impl HandshakeError {
    /// Returns the reason in one word, for the counter of refused connections.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Io(_) | Self::Refused => "broken",
            Self::OtherProtocol(_) | Self::Closed(_) => "protocol",
            Self::WrongSecret | Self::NoProof => "secret",
            Self::Intercepted => "intercepted",
            Self::Mismatch(_) => "encryption",
            Self::Tls(_) => "tls",
        }
    }

    /// Returns true if the error shows that the other end knows the secret.
    pub const fn is_of_a_member(&self) -> bool {
        matches!(self, Self::Intercepted | Self::Mismatch(_) | Self::Tls(_))
    }

    /// Returns `Err(otherwise)` if the other end hung up.
    fn unless_hung_up<T>(read: io::Result<T>, otherwise: Self) -> Result<T, Self> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        read.map_err(|error| match error.kind() {
            UnexpectedEof | ConnectionReset | BrokenPipe => otherwise,
            _ => error.into(),
        })
    }
}

/// The handshake of a protocol, and what proves it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Handshake {
    /// The protocol.
    pub protocol: Protocol,
    /// The secret of the job.
    pub secret: Secret,
    /// The encryption of its connections.
    pub security: Security,
}

/// A client that has proved itself, and waits for the server's last proof.
pub struct Accepted<S, const N: usize> {
    /// The client's description of itself.
    pub hello: [u8; N],
    stream: Secured<S>,
    welcome: Proof,
}

impl<S: AsyncRead + AsyncWrite + Unpin, const N: usize> Accepted<S, N> {
    /// Ends the handshake. Dropping the client refuses it.
    ///
    /// # Errors
    /// [`HandshakeError::Io`] when the connection breaks.
    pub async fn welcome(mut self) -> Result<Secured<S>, HandshakeError> {
        self.stream.write_all(&self.welcome).await?;
        self.stream.flush().await?;
        Ok(self.stream)
    }
}

impl Handshake {
    /// Runs the server's side. `here` is the protection of the address that accepts. Returns `None` for a client that
    /// disconnects without a byte. A client that knows the secret leaves its admission.
    ///
    /// # Errors
    /// Returns why the client was refused.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin, const N: usize>(
        &self,
        mut stream: S,
        here: Protection,
        admission: &AdmissionToken,
    ) -> Result<Option<Accepted<S, N>>, HandshakeError> {
        let mut client = [0; OPENING];
        let (preface, nonce) = client.split_first_chunk_mut::<PREFACE>().expect("an opening is longer");
        let first = stream.read(preface).await?;
        if first == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut preface[first..]).await?;
        let there = self.read_preface(*preface);
        if preface.starts_with(FAMILY) {
            // Also of another version, which then sees a close: bytes that nobody has read would make it a reset.
            stream.read_exact(nonce).await?;
        }
        let there = there?;
        let proofs = Proofs { secret: &self.secret, client, server: self.opening(here)? };
        stream.write_all(&[&proofs.server[..], &proofs.make("server", &[])].concat()).await?;
        let mut proof = [0; PROOF];
        // The client disconnects when it finds the server's proof wrong.
        HandshakeError::unless_hung_up(stream.read_exact(&mut proof).await, HandshakeError::NoProof)?;
        if !proofs.is_right("client", &[], &proof) {
            return Err(HandshakeError::WrongSecret);
        }
        admission.release();
        Security::agree(here, there)?;

        let mut stream = self.security.accept(here, stream).await?;
        let binding = *stream.binding();
        let mut hello = [0; N];
        stream.read_exact(&mut hello).await?;
        stream.read_exact(&mut proof).await?;
        if !proofs.is_right("client channel", &[&binding, &hello], &proof) {
            return Err(HandshakeError::Intercepted);
        }
        let welcome = proofs.make("server channel", &[&binding, &hello]);
        Ok(Some(Accepted { hello, stream, welcome }))
    }

    /// Runs the client's side, which says `hello` of itself. `here` is the protection of the address it has connected to.
    ///
    /// # Errors
    /// Returns why there is no connection.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        mut stream: S,
        here: Protection,
        hello: &[u8],
    ) -> Result<Secured<S>, HandshakeError> {
        let client = self.opening(here)?;
        stream.write_all(&client).await?;
        let (mut server, mut proof) = ([0; OPENING], [0; PROOF]);
        let (preface, nonce) = server.split_first_chunk_mut::<PREFACE>().expect("an opening is longer");
        let there = match stream.read_exact(preface).await {
            Ok(_) => self.read_preface(*preface)?,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(HandshakeError::Closed(self.protocol));
            }
            Err(error) => return Err(error.into()),
        };
        stream.read_exact(nonce).await?;
        stream.read_exact(&mut proof).await?;
        let proofs = Proofs { secret: &self.secret, client, server };
        if !proofs.is_right("server", &[], &proof) {
            return Err(HandshakeError::WrongSecret);
        }
        // Also to a server with other settings, which can then report them too.
        stream.write_all(&proofs.make("client", &[])).await?;
        Security::agree(here, there)?;

        let secured = self.security.connect(here, stream).await;
        let mut stream = HandshakeError::unless_hung_up(secured, HandshakeError::Refused)?;
        let binding = *stream.binding();
        let last = [hello, &proofs.make("client channel", &[&binding, hello])].concat();
        let answer = async {
            stream.write_all(&last).await?;
            stream.flush().await?;
            stream.read_exact(&mut proof).await
        };
        HandshakeError::unless_hung_up(answer.await, HandshakeError::Refused)?;
        if !proofs.is_right("server channel", &[&binding, hello], &proof) {
            return Err(HandshakeError::Intercepted);
        }
        Ok(stream)
    }

    pub(crate) fn opening(&self, here: Protection) -> io::Result<Opening> {
        let mut bytes = [0; OPENING];
        bytes[..PREFACE - 1].copy_from_slice(&self.protocol.magic());
        bytes[PREFACE - 1] = here.byte();
        getrandom::fill(&mut bytes[PREFACE..]).map_err(io::Error::other)?;
        Ok(bytes)
    }

    /// Returns the protection that the other end uses for the connection.
    fn read_preface(&self, bytes: [u8; PREFACE]) -> Result<Protection, HandshakeError> {
        let [magic @ .., protection] = bytes;
        let protection =
            (magic == self.protocol.magic()).then(|| Protection::from_byte(protection)).flatten();
        protection.ok_or(HandshakeError::OtherProtocol(self.protocol))
    }
}

/// The openings of the two ends, and the secret that they prove.
struct Proofs<'a> {
    secret: &'a Secret,
    client: Opening,
    server: Opening,
}

impl Proofs<'_> {
    fn mac(&self, label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(self.secret.expose()).expect("HMAC takes keys of any length");
        [label.as_bytes(), &self.client, &self.server].iter().chain(parts).for_each(|part| mac.update(part));
        mac
    }

    fn make(&self, label: &str, parts: &[&[u8]]) -> Proof {
        self.mac(label, parts).finalize().into_bytes().into()
    }

    /// Verifies a proof in constant time.
    fn is_right(&self, label: &str, parts: &[&[u8]], proof: &Proof) -> bool {
        self.mac(label, parts).verify_slice(proof).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use ryzanstein_config::SecurityConfig;
    use tokio::io::{DuplexStream, duplex};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    const OURS: Secret = Secret::new([7; 32]);

    /// One key serves all.
    fn security() -> Security {
        static SECURITY: LazyLock<Security> =
            LazyLock::new(|| Security::new(&SecurityConfig::default()).expect("settings"));
        SECURITY.clone()
    }

    fn handshake() -> Handshake {
        Handshake { protocol: Protocol::Data, secret: OURS, security: security() }
    }

    async fn accept(a: DuplexStream, here: Protection) -> Result<Secured<DuplexStream>, HandshakeError> {
        let client =
            handshake().accept::<_, 3>(a, here, &AdmissionToken::default()).await?.expect("it speaks");
        assert_eq!(&client.hello, b"abc");
        client.welcome().await
    }

    async fn connect(b: DuplexStream, here: Protection) -> Result<Secured<DuplexStream>, HandshakeError> {
        handshake().connect(b, here, b"abc").await
    }

    #[tokio::test(flavor = "current_thread")]
    async fn two_ends_with_the_same_secret_accept_each_other() {
        for here in Protection::ALL {
            let (a, b) = duplex(1024);
            let (server, client) = tokio::join!(accept(a, here), connect(b, here));
            let (mut server, mut client) = (server.expect("accepted"), client.expect("accepted"));
            assert_eq!(server.binding(), client.binding());
            assert_eq!(*server.binding() == [0; 32], here == Protection::Clear);
            client.write_all(b"a word").await.expect("written");
            client.flush().await.expect("sent");
            let mut word = [0; 6];
            server.read_exact(&mut word).await.expect("read");
            assert_eq!(&word, b"a word");
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn another_protocol_is_refused_after_eight_bytes_and_silence_is_no_client() {
        for said in [b"GET / HT", b"RYZCTL\x05\x00", b"RYZLNK\x10\x02"] {
            let (a, mut b) = duplex(1024);
            b.write_all(said).await.expect("written");
            if said.starts_with(FAMILY) {
                b.write_all(&[0; OPENING - PREFACE]).await.expect("written");
            }
            let refused = accept(a, Protection::Clear).await;
            assert!(matches!(refused, Err(HandshakeError::OtherProtocol(Protocol::Data))), "{refused:?}");
        }
        let (a, b) = duplex(1024);
        drop(b);
        let nobody = handshake().accept::<_, 0>(a, Protection::Clear, &AdmissionToken::default()).await;
        assert!(matches!(nobody, Ok(None)));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_server_of_another_version_is_named() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let client = async {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let outcome = handshake().connect(stream, Protection::Clear, &[]).await;
            outcome.map(drop).expect_err("refused")
        };
        let server = async {
            let control = Handshake { protocol: Protocol::Control, ..handshake() };
            let stream = listener.accept().await.unwrap().0;
            let outcome = control.accept::<_, 0>(stream, Protection::Clear, &AdmissionToken::default()).await;
            assert!(matches!(outcome, Err(HandshakeError::OtherProtocol(Protocol::Control))));
        };
        let (refused, ()) = tokio::join!(client, server);
        assert!(matches!(refused, HandshakeError::Closed(Protocol::Data)), "{refused:?}");
    }

    /// Passes a handshake in clear on, with one bit changed in the message with this number, and returns what both ends say.
    async fn with_changed_bit(
        message: usize,
        bit: usize,
    ) -> (Option<HandshakeError>, Option<HandshakeError>) {
        let (a, mut towards_server) = duplex(1024);
        let (b, mut towards_client) = duplex(1024);
        let lengths = [OPENING, OPENING + PROOF, PROOF, 3 + PROOF, PROOF];
        // It hangs up on both when one of them does.
        let middle = async move {
            for (number, length) in lengths.into_iter().enumerate() {
                let (from, to) = match number {
                    1 | 4 => (&mut towards_server, &mut towards_client),
                    _ => (&mut towards_client, &mut towards_server),
                };
                let mut bytes = vec![0; length];
                if from.read_exact(&mut bytes).await.is_err() {
                    return;
                }
                if number == message {
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
                if to.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        };
        let clear = Protection::Clear;
        let (server, client, ()) = tokio::join!(accept(a, clear), connect(b, clear), middle);
        (server.err(), client.err())
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_changed_bit_of_any_message_is_refused() {
        for (message, length) in [OPENING, OPENING + PROOF, PROOF, 3 + PROOF, PROOF].into_iter().enumerate() {
            for bit in 0..length * 8 {
                let (server, client) = with_changed_bit(message, bit).await;
                assert!(client.is_some(), "bit {bit} of message {message}");
                // The server has sent the last message, and does not learn of its fate.
                assert_eq!(server.is_some(), message < 4, "bit {bit} of message {message}");
            }
        }
    }

    #[test]
    fn no_proof_stands_in_for_another() {
        let (client, server) = ([1; OPENING], [2; OPENING]);
        let (other, binding) = (Secret::new([8; 32]), [6; 32]);
        let proofs = Proofs { secret: &OURS, client, server };
        let said: [&[u8]; 2] = [&binding, b"abc"];
        let good = proofs.make("client channel", &said);
        assert!(proofs.is_right("client channel", &said, &good));
        assert!(!proofs.is_right("server channel", &said, &good), "sent back");
        assert!(!proofs.is_right("client channel", &[&[5; 32], b"abc"], &good), "another channel");
        assert!(!proofs.is_right("client channel", &[&binding, b"abd"], &good), "another hello");
        let recorded = Proofs { server: [3; OPENING], ..proofs };
        assert!(!recorded.is_right("client channel", &said, &good), "replayed");
        let stranger = Proofs { secret: &other, client, server };
        assert!(!stranger.is_right("client channel", &said, &good), "another secret");
        let [mine, theirs] = ["client", "server"].map(|label| proofs.make(label, &[]));
        assert!(proofs.is_right("client", &[], &mine) && !proofs.is_right("client", &[], &theirs));
    }
}
