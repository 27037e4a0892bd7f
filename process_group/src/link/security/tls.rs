//! TLS 1.3 by rustls, with ring.
//!
//! Without certificates, the accepting end has a raw public key (RFC 7250) that it made when it started, and nothing checks the
//! owner of the key: the proof of the job's secret that follows includes the channel's binding, so it is valid for the two ends of
//! this channel only. With certificates, both ends also check that the other's comes from one of the authorities. Names in
//! certificates are not compared: ranks have addresses and no names, and the secret decides which ranks belong to the job.

use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{
    CryptoProvider, ring as provider, verify_tls13_signature, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, PeerIncompatible, RootCertStore, ServerConfig,
    SignatureScheme,
};
use ryzanstein_config::{ByteSize, EncryptionChoice, file};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{Binding, Protection, Secured, SecurityError};

/// RFC 9266.
const EXPORTER: &[u8] = b"EXPORTER-Channel-Binding";

/// The files of `[security]`.
pub(super) struct Files<'a> {
    pub(super) certificate: &'a Path,
    pub(super) key: &'a Path,
    pub(super) ca: &'a Path,
}

/// Both ends of TLS.
#[derive(Clone)]
pub(super) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    protection: Protection,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tls").field(&self.protection).finish()
    }
}

impl Tls {
    pub(super) fn new(files: Option<&Files<'_>>, _: EncryptionChoice) -> Result<Self, String> {
        // It is never the default of the process, which may belong to another library.
        let provider = Arc::new(provider::default_provider());
        let (mut client, mut server) = match files {
            Some(files) => certified(&provider, files)?,
            None => encrypted(&provider)
                .map_err(|error| format!("no key for encrypted connections could be made: {error}"))?,
        };
        // A connection lives as long as its group: no session is resumed.
        client.resumption = Resumption::disabled();
        server.send_tls13_tickets = 0;
        let protection = if files.is_some() { Protection::Certified } else { Protection::Encrypted };
        Ok(Self { client: Arc::new(client), server: Arc::new(server), protection })
    }

    pub(super) fn protection(&self) -> Protection {
        self.protection
    }

    pub(super) async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> Result<Secured<S>, SecurityError> {
        // The name is never checked.
        let name = ServerName::try_from("ryzanstein").map_err(std::io::Error::other)?;
        let stream = TlsConnector::from(Arc::clone(&self.client)).connect(name, stream).await?;
        let binding = stream.get_ref().1.export_keying_material(Binding::default(), EXPORTER, None);
        Ok(Secured::tls(stream.into(), binding.map_err(std::io::Error::other)?))
    }

    pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> Result<Secured<S>, SecurityError> {
        let stream = TlsAcceptor::from(Arc::clone(&self.server)).accept(stream).await?;
        let binding = stream.get_ref().1.export_keying_material(Binding::default(), EXPORTER, None);
        Ok(Secured::tls(stream.into(), binding.map_err(std::io::Error::other)?))
    }
}

/// Configures TLS with a new key, and no certificate.
fn encrypted(provider: &Arc<CryptoProvider>) -> Result<(ClientConfig, ServerConfig), TlsError> {
    let pkcs8 =
        Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|_| TlsError::FailedToGetRandomBytes)?;
    let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8.as_ref()))?;
    let public = key.public_key().ok_or_else(|| TlsError::General("a key without a public half".into()))?;
    let certified = CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key);
    let server = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(certified))));
    let verifier = Verifier { provider: Arc::clone(provider), authorities: None };
    let client = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    Ok((client, server))
}

/// Configures TLS with the certificates of both ends.
fn certified(
    provider: &Arc<CryptoProvider>,
    files: &Files<'_>,
) -> Result<(ClientConfig, ServerConfig), String> {
    let chain = certificates("security.certificate", files.certificate)?;
    let key = PrivateKeyDer::from_pem_slice(&private(files.key)?).map_err(|error| {
        format!("security.key: {} has no private key in PEM format: {error}", files.key.display())
    })?;
    let mut authorities = RootCertStore::empty();
    for certificate in certificates("security.ca", files.ca)? {
        authorities.add(certificate).map_err(|error| {
            format!("security.ca: {} holds a bad certificate: {error}", files.ca.display())
        })?;
    }
    let authorities = Arc::new(authorities);
    let failed = |error: TlsError| {
        format!(
            "security.certificate and security.key ({} and {}) cannot be used together: {error}",
            files.certificate.display(),
            files.key.display()
        )
    };
    let checks = WebPkiClientVerifier::builder_with_provider(Arc::clone(&authorities), Arc::clone(provider))
        .build()
        .map_err(|error| format!("security.ca: {}: {error}", files.ca.display()))?;
    let server = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(failed)?
        .with_client_cert_verifier(checks)
        .with_single_cert(chain.clone(), key.clone_key())
        .map_err(failed)?;
    let verifier = Verifier { provider: Arc::clone(provider), authorities: Some(authorities) };
    let client = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(failed)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(chain, key)
        .map_err(failed)?;
    Ok((client, server))
}

/// Maximum number of bytes of a file of certificates or of a key.
const MOST: ByteSize = ByteSize::bytes(1 << 20);

fn read(setting: &str, path: &Path) -> Result<Vec<u8>, String> {
    file::read_trusted(path, MOST)
        .map_err(|error| format!("{setting}: cannot read {}: {error}", path.display()))
}

/// Reads a private key, from a file that no other user can read.
fn private(path: &Path) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let key = read("security.key", path)?;
    let metadata =
        path.metadata().map_err(|error| format!("security.key: cannot look at {shown}: {error}"))?;
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "security.key: others can read {shown} (mode {mode:04o}); make it 0600: chmod 600 {shown}"
        ));
    }
    Ok(key)
}

fn certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = read(setting, path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(format!("{setting}: {} has no certificate in PEM format", path.display())),
        Err(error) => Err(format!("{setting}: cannot read certificates from {}: {error}", path.display())),
    }
}

/// The checks of the dialling end on the accepting end's key: the key signs the handshake and, if there are authorities, one of
/// them has certified it.
#[derive(Debug)]
struct Verifier {
    provider: Arc<CryptoProvider>,
    authorities: Option<Arc<RootCertStore>>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        if let Some(authorities) = &self.authorities {
            let certificate = ParsedCertificate::try_from(end_entity)?;
            let known = self.provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&certificate, authorities, intermediates, now, known)?;
        }
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
        let known = &self.provider.signature_verification_algorithms;
        if self.requires_raw_public_keys() {
            let key = SubjectPublicKeyInfoDer::from(certificate.as_ref());
            return verify_tls13_signature_with_raw_key(message, &key, signed, known);
        }
        verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.authorities.is_none()
    }
}
