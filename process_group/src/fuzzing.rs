//! The decoders of this crate for the fuzz targets. Not part of the API: it may change at any time.

use crate::link::security::{Binding, Protection};
use crate::link::wire::frame::{HEADER, Header};
use crate::link::wire::hello::{self, CHALLENGE, CLIENT_PROOF, HELLO, Hello, Nonce, Opening, REPLY, WELCOME};
use crate::membership::roster::Secret;
use crate::stream::fuzzing as control;

const SECRET: [u8; 32] = [7; 32];
const NONCE: Nonce = [1; 32];
const BINDING: Binding = [2; 32];

/// Decodes consecutive headers of the data plane: each decodes to a value that encodes to it again, or to nothing.
pub fn frames(bytes: &[u8]) {
    for bytes in bytes.as_chunks::<HEADER>().0 {
        let Some(header) = Header::decode(bytes) else { continue };
        assert_eq!(Header::decode(&header.encode()), Some(header));
        assert!(header.following() <= header.length);
    }
}

/// Decodes the first messages of a link, from an end that does not know the secret, and a hello of one that does.
pub fn link_handshake(bytes: &[u8]) {
    let secret = Secret::new(SECRET);
    if let Some(preface) = bytes.first_chunk()
        && let Some(protection) = hello::read_preface(*preface)
    {
        assert_eq!(hello::challenge(protection, &NONCE)[..preface.len()], *preface);
    }
    let challenge = bytes.first_chunk().copied().unwrap_or([0; CHALLENGE]);
    if let Some(proof) = bytes.last_chunk::<CLIENT_PROOF>() {
        assert_eq!(
            Opening::verify_client(&secret, &challenge, proof),
            None,
            "a peer without the secret is believed"
        );
    }
    let (_, opening) = Opening::prove_client(&secret, &challenge, Protection::Encrypted, &NONCE);
    if let Some(reply) = bytes.last_chunk::<REPLY>() {
        assert!(!opening.is_reply(&secret, reply), "a peer without the secret is believed");
    }
    let Some(unproven) = bytes.first_chunk::<HELLO>() else { return };
    assert_eq!(
        Hello::decode(&secret, &opening, &BINDING, unproven),
        None,
        "a peer without the secret is believed"
    );
    let hello = Hello::unproven(unproven);
    assert_eq!(
        Hello::decode(&secret, &opening, &BINDING, &hello.encode(&secret, &opening, &BINDING)),
        Some(hello)
    );
    if let Some(welcome) = bytes.last_chunk::<WELCOME>() {
        assert!(
            !hello.is_welcome(&secret, &opening, &BINDING, welcome),
            "a peer without the secret is believed"
        );
    }
}

/// Decodes the messages between the watchdogs of a group, as a stream.
pub fn control_messages(bytes: &[u8]) {
    control::messages(bytes);
}
