//! How a link begins: both ends prove that they know the job's secret, before either believes anything.
//!
//! ```text
//! acceptor → dialler   challenge  "RYZL" version(4) nonce_a(32) place_a(12)                              52 bytes
//! dialler  → acceptor  hello      nonce_d(32) place_d(12) epoch(8) group(32) from(4) to(4) mac(32)      124 bytes
//! acceptor → dialler   welcome    mac(32)                                                                32 bytes
//! ```
//! `mac` is HMAC-SHA-256 under the secret over a label, both nonces, both places and the fields. All lengths are fixed, and
//! the MAC is checked before a field is looked at. A place says where in its sender's memory the nonce lies: whoever finds
//! it there shares a host with the sender and may read its memory. The data after it is neither encrypted nor signed: see
//! the failure model.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::rank::{Epoch, Rank};
use crate::roster::Secret;

/// First bytes of a data link, with the version of everything in `wire`.
const MAGIC: [u8; 8] = *b"RYZL\x02\0\0\0";

pub(crate) const CHALLENGE: usize = 52;
pub(crate) const HELLO: usize = 124;
pub(crate) const WELCOME: usize = 32;

pub(crate) type Nonce = [u8; 32];

/// Where something lies in a process's memory. All zero for a process that does not let others read it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Place {
    pub(crate) pid: u32,
    pub(crate) address: u64,
}

impl Place {
    const BYTES: usize = 12;

    fn bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..].copy_from_slice(&self.address.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Self {
        Self {
            pid: u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")),
            address: u64::from_le_bytes(bytes[4..Self::BYTES].try_into().expect("eight bytes")),
        }
    }
}

/// What one end has said of itself so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct End {
    pub(crate) nonce: Nonce,
    /// Of the nonce.
    pub(crate) place: Place,
}

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

fn mac(secret: &Secret, label: &[u8], accepting: &End, dialling: &End, id: &LinkId) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.expose()).expect("HMAC takes keys of any length");
    let (at_a, at_d) = (accepting.place.bytes(), dialling.place.bytes());
    for part in [label, &accepting.nonce, &dialling.nonce, &at_a, &at_d, &id.bytes()] {
        mac.update(part);
    }
    mac
}

pub(crate) fn challenge(accepting: &End) -> [u8; CHALLENGE] {
    let mut bytes = [0; CHALLENGE];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..40].copy_from_slice(&accepting.nonce);
    bytes[40..].copy_from_slice(&accepting.place.bytes());
    bytes
}

/// The acceptor, or `None` when the other end is not one of us.
pub(crate) fn read_challenge(bytes: &[u8; CHALLENGE]) -> Option<End> {
    let nonce = bytes[8..40].try_into().expect("32 bytes");
    (bytes[..8] == MAGIC).then(|| End { nonce, place: Place::read(&bytes[40..]) })
}

pub(crate) fn hello(secret: &Secret, accepting: &End, dialling: &End, id: &LinkId) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..32].copy_from_slice(&dialling.nonce);
    bytes[32..44].copy_from_slice(&dialling.place.bytes());
    bytes[44..92].copy_from_slice(&id.bytes());
    bytes[92..].copy_from_slice(&mac(secret, b"dial", accepting, dialling, id).finalize().into_bytes());
    bytes
}

/// What a dialler that knows the secret says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub(crate) id: LinkId,
    pub(crate) dialling: End,
    /// To answer with.
    pub(crate) welcome: [u8; WELCOME],
}

/// `None` when the dialler does not know the secret.
pub(crate) fn read_hello(secret: &Secret, accepting: &End, bytes: &[u8; HELLO]) -> Option<Hello> {
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let dialling =
        End { nonce: bytes[..32].try_into().expect("32 bytes"), place: Place::read(&bytes[32..44]) };
    let id = LinkId {
        epoch: Epoch(u64::from_le_bytes(bytes[44..52].try_into().expect("eight bytes"))),
        group: bytes[52..84].try_into().expect("32 bytes"),
        from: Rank(u32_at(84)),
        to: Rank(u32_at(88)),
    };
    // Compares in constant time.
    mac(secret, b"dial", accepting, &dialling, &id).verify_slice(&bytes[92..]).ok()?;
    let welcome = mac(secret, b"accept", accepting, &dialling, &id).finalize().into_bytes().into();
    Some(Hello { id, dialling, welcome })
}

/// Whether the acceptor knows the secret too.
pub(crate) fn check_welcome(
    secret: &Secret,
    accepting: &End,
    dialling: &End,
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

    fn end(byte: u8) -> End {
        End { nonce: [byte; 32], place: Place { pid: u32::from(byte), address: u64::from(byte) << 33 } }
    }

    #[test]
    fn both_ends_convince_each_other_with_the_same_secret() {
        let (secret, a, d) = (Secret::new([7; 32]), end(1), end(2));
        let heard = read_challenge(&challenge(&a)).unwrap();
        assert_eq!(heard, a);
        let said = read_hello(&secret, &a, &hello(&secret, &heard, &d, &id())).unwrap();
        assert_eq!((said.id, said.dialling), (id(), d));
        assert!(check_welcome(&secret, &a, &d, &id(), &said.welcome));
    }

    #[test]
    fn another_secret_another_end_or_a_changed_bit_is_refused() {
        let (secret, a, d) = (Secret::new([7; 32]), end(1), end(2));
        let good = hello(&secret, &a, &d, &id());
        assert!(read_hello(&Secret::new([8; 32]), &a, &good).is_none());
        let replayed = End { nonce: [9; 32], ..a };
        assert!(
            read_hello(&secret, &replayed, &good).is_none(),
            "a recorded hello does not open a second link"
        );
        let elsewhere = End { place: Place { pid: 9, ..a.place }, ..a };
        assert!(read_hello(&secret, &elsewhere, &good).is_none(), "nobody can be sent to another process");
        for bit in 0..HELLO * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(read_hello(&secret, &a, &bad).is_none(), "bit {bit}");
        }
        let welcome = read_hello(&secret, &a, &good).unwrap().welcome;
        let other = LinkId::new(Epoch(4), "world", Rank(2), Rank(0));
        assert!(!check_welcome(&secret, &a, &d, &other, &welcome), "an epoch cannot stand in for another");
    }
}
