//! TLS 1.3 by rustls, with ring.
//!
//! The accepting end has a raw public key (RFC 7250) that it made when it started, and nothing checks the owner of the key: the proof
//! of the job's secret that follows includes the channel's binding, so it is valid for the two ends of this channel only.

use std::sync::Arc;
use std::{fmt, io};

use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, PeerIncompatible, ServerConfig, SignatureScheme,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{Binding, Secured};

/// RFC 9266.
const EXPORTER: &[u8] = b"EXPORTER-Channel-Binding";

/// Both ends of TLS.
#[derive(Clone)]
pub(super) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Makes a new key.
    pub(super) fn new() -> Result<Self, TlsError> {
        // It is never the default of the process, which may belong to another library.
        let provider = Arc::new(provider::default_provider());
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new())
            .map_err(|_| TlsError::FailedToGetRandomBytes)?;
        let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8.as_ref()))?;
        let public =
            key.public_key().ok_or_else(|| TlsError::General("a key without a public half".into()))?;
        let certified = CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key);
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(certified))));
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Verifier(provider)))
            .with_no_client_auth();
        // A connection lives as long as its group: no session is resumed.
        client.resumption = Resumption::disabled();
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }

    pub(super) async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<Secured<S>> {
        // The name is never checked.
        let name = ServerName::try_from("ryzanstein").map_err(io::Error::other)?;
        let stream = TlsConnector::from(Arc::clone(&self.client)).connect(name, stream).await?;
        let binding = stream.get_ref().1.export_keying_material(Binding::default(), EXPORTER, None);
        Ok(Secured::tls(stream.into(), binding.map_err(io::Error::other)?))
    }

    pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<Secured<S>> {
        let stream = TlsAcceptor::from(Arc::clone(&self.server)).accept(stream).await?;
        let binding = stream.get_ref().1.export_keying_material(Binding::default(), EXPORTER, None);
        Ok(Secured::tls(stream.into(), binding.map_err(io::Error::other)?))
    }
}

/// The check of the dialling end on the accepting end's key: it signs the handshake.
#[derive(Debug)]
struct Verifier(Arc<CryptoProvider>);

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        Err(TlsError::PeerIncompatible(PeerIncompatible::ServerDoesNotSupportTls12Or13))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let key = SubjectPublicKeyInfoDer::from(certificate.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
