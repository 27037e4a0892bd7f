//! How a link begins: both ends prove that they know the job's secret, before either believes anything.
//!
//! ```text
//! acceptor → dialler   challenge  "RYZL" version(4) nonce_a(32)                                          40 bytes
//! dialler  → acceptor  hello      nonce_d(32) epoch(8) group(32) from(4) to(4) mac(32)                  112 bytes
//! acceptor → dialler   welcome    mac(32)                                                                32 bytes
//! ```
//! `mac` is HMAC-SHA-256 under the secret over a label, both nonces and the fields. All lengths are fixed, and the MAC is
//! checked before a field is looked at. The data after it is neither encrypted nor signed: see the failure model.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::rank::{Epoch, Rank};
use crate::roster::Secret;

/// First bytes of a data link, with the version of everything in `wire`.
const MAGIC: [u8; 8] = *b"RYZL\x01\0\0\0";

pub(crate) const CHALLENGE: usize = 40;
pub(crate) const HELLO: usize = 112;
pub(crate) const WELCOME: usize = 32;

pub(crate) type Nonce = [u8; 32];

/// Which link this is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct LinkId {
    pub(crate) epoch: Epoch,
    /// Digest of the group's name.
    pub(crate) group: [u8; 32],
    /// Who dials, as a global rank.
    pub(crate) from: Rank,
    /// Who accepts, as a global rank.
    pub(crate) to: Rank,
}

impl LinkId {
    pub(crate) fn new(epoch: Epoch, group: &str, from: Rank, to: Rank) -> Self {
        Self { epoch, group: Sha256::digest(group.as_bytes()).into(), from, to }
    }

    fn bytes(&self) -> [u8; 48] {
        let mut bytes = [0; 48];
        bytes[..8].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[8..40].copy_from_slice(&self.group);
        bytes[40..44].copy_from_slice(&self.from.0.to_le_bytes());
        bytes[44..].copy_from_slice(&self.to.0.to_le_bytes());
        bytes
    }
}

fn mac(secret: &Secret, label: &[u8], accepting: &Nonce, dialling: &Nonce, id: &LinkId) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.expose()).expect("HMAC takes keys of any length");
    for part in [label, accepting, dialling, &id.bytes()] {
        mac.update(part);
    }
    mac
}

pub(crate) fn challenge(nonce: &Nonce) -> [u8; CHALLENGE] {
    let mut bytes = [0; CHALLENGE];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(nonce);
    bytes
}

/// The acceptor's nonce, or `None` when the other end is not one of us.
pub(crate) fn read_challenge(bytes: &[u8; CHALLENGE]) -> Option<Nonce> {
    (bytes[..8] == MAGIC).then(|| bytes[8..].try_into().expect("32 bytes"))
}

pub(crate) fn hello(secret: &Secret, accepting: &Nonce, dialling: &Nonce, id: &LinkId) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..32].copy_from_slice(dialling);
    bytes[32..80].copy_from_slice(&id.bytes());
    bytes[80..].copy_from_slice(&mac(secret, b"dial", accepting, dialling, id).finalize().into_bytes());
    bytes
}

/// Who dials, and the welcome to answer with, or `None` when the dialler does not know the secret.
pub(crate) fn read_hello(
    secret: &Secret,
    accepting: &Nonce,
    bytes: &[u8; HELLO],
) -> Option<(LinkId, [u8; WELCOME])> {
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let dialling: Nonce = bytes[..32].try_into().expect("32 bytes");
    let id = LinkId {
        epoch: Epoch(u64::from_le_bytes(bytes[32..40].try_into().expect("eight bytes"))),
        group: bytes[40..72].try_into().expect("32 bytes"),
        from: Rank(u32_at(72)),
        to: Rank(u32_at(76)),
    };
    // Compares in constant time.
    mac(secret, b"dial", accepting, &dialling, &id).verify_slice(&bytes[80..]).ok()?;
    Some((id, mac(secret, b"accept", accepting, &dialling, &id).finalize().into_bytes().into()))
}

/// Whether the acceptor knows the secret too.
pub(crate) fn check_welcome(
    secret: &Secret,
    accepting: &Nonce,
    dialling: &Nonce,
    id: &LinkId,
    bytes: &[u8; WELCOME],
) -> bool {
    mac(secret, b"accept", accepting, dialling, id).verify_slice(bytes).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> LinkId {
        LinkId::new(Epoch(3), "world", Rank(2), Rank(0))
    }

    #[test]
    fn both_ends_convince_each_other_with_the_same_secret() {
        let (secret, a, d) = (Secret::new([7; 32]), [1; 32], [2; 32]);
        let heard = read_challenge(&challenge(&a)).unwrap();
        let (who, welcome) = read_hello(&secret, &a, &hello(&secret, &heard, &d, &id())).unwrap();
        assert_eq!(who, id());
        assert!(check_welcome(&secret, &a, &d, &id(), &welcome));
    }

    #[test]
    fn another_secret_another_nonce_or_a_changed_bit_is_refused() {
        let (secret, a, d) = (Secret::new([7; 32]), [1; 32], [2; 32]);
        let good = hello(&secret, &a, &d, &id());
        assert!(read_hello(&Secret::new([8; 32]), &a, &good).is_none());
        assert!(read_hello(&secret, &[9; 32], &good).is_none(), "a recorded hello does not open a second link");
        for bit in 0..HELLO * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(read_hello(&secret, &a, &bad).is_none(), "bit {bit}");
        }
        let (_, welcome) = read_hello(&secret, &a, &good).unwrap();
        let other = LinkId::new(Epoch(4), "world", Rank(2), Rank(0));
        assert!(!check_welcome(&secret, &a, &d, &other, &welcome), "an epoch cannot stand in for another");
    }
}
