//! How a link begins: both ends prove that they know the job's secret, before either believes anything.
//!
//! ```text
//! acceptor → dialler   challenge  "RYZL" version(4) nonce_a(32)                                          40 bytes
//! dialler  → acceptor  hello      nonce_d(32) memory_d(44) epoch(8) group(32) from(4) to(4) mac(32)     156 bytes
//! acceptor → dialler   welcome    memory_a(44) mac(32)                                                   76 bytes
//! ```
//! `mac` is HMAC-SHA-256 under the secret over a label, all that was said before and what it stands behind. All lengths are
//! fixed, and the MAC is checked before a field is looked at. An end that does not know the secret learns a random number.
//! A memory field is a token and where it lies in its sender's memory: whoever finds it there shares a host with the sender
//! and may read its memory. The data after it is neither encrypted nor signed: see the failure model.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::rank::{Epoch, Rank};
use crate::roster::Secret;

/// First bytes of a data link, with the version of everything in `wire`.
const MAGIC: [u8; 8] = *b"RYZL\x03\0\0\0";

pub(crate) const CHALLENGE: usize = 40;
pub(crate) const HELLO: usize = 156;
pub(crate) const WELCOME: usize = 76;

pub(crate) type Nonce = [u8; 32];

/// A token, and where it lies in its sender's memory. All zero for a process that does not let others read it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct MemoryToken {
    pub(crate) pid: u32,
    pub(crate) address: u64,
    pub(crate) token: Nonce,
}

impl MemoryToken {
    const BYTES: usize = 44;

    fn bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.address.to_le_bytes());
        bytes[12..].copy_from_slice(&self.token);
        bytes
    }

    fn read(bytes: &[u8]) -> Self {
        Self {
            pid: u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")),
            address: u64::from_le_bytes(bytes[4..12].try_into().expect("eight bytes")),
            token: bytes[12..Self::BYTES].try_into().expect("32 bytes"),
        }
    }
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

fn mac(secret: &Secret, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.expose()).expect("HMAC takes keys of any length");
    for part in parts {
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

/// What a dialler says, to whom it proves that it knows the secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub(crate) nonce: Nonce,
    pub(crate) memory: MemoryToken,
    pub(crate) id: LinkId,
}

impl Hello {
    const SAID: usize = HELLO - 32;

    fn said(&self) -> [u8; Self::SAID] {
        let mut bytes = [0; Self::SAID];
        bytes[..32].copy_from_slice(&self.nonce);
        bytes[32..76].copy_from_slice(&self.memory.bytes());
        bytes[76..].copy_from_slice(&self.id.bytes());
        bytes
    }

    /// In answer to the acceptor's nonce.
    pub(crate) fn encode(&self, secret: &Secret, accepting: &Nonce) -> [u8; HELLO] {
        let said = self.said();
        let mut bytes = [0; HELLO];
        bytes[..Self::SAID].copy_from_slice(&said);
        let mac = mac(secret, &[b"dial", accepting, &said]);
        bytes[Self::SAID..].copy_from_slice(&mac.finalize().into_bytes());
        bytes
    }

    /// `None` when the dialler does not know the secret.
    pub(crate) fn decode(secret: &Secret, accepting: &Nonce, bytes: &[u8; HELLO]) -> Option<Self> {
        let (said, proof) = bytes.split_at(Self::SAID);
        // Compares in constant time.
        mac(secret, &[b"dial", accepting, said]).verify_slice(proof).ok()?;
        Some(Self::unproven(bytes))
    }

    /// What a hello says, whoever said it.
    pub(crate) fn unproven(said: &[u8; HELLO]) -> Self {
        let u32_at = |at: usize| u32::from_le_bytes(said[at..at + 4].try_into().expect("four bytes"));
        let id = LinkId {
            epoch: Epoch(u64::from_le_bytes(said[76..84].try_into().expect("eight bytes"))),
            group: said[84..116].try_into().expect("32 bytes"),
            from: Rank(u32_at(116)),
            to: Rank(u32_at(120)),
        };
        let nonce = said[..32].try_into().expect("32 bytes");
        Self { nonce, memory: MemoryToken::read(&said[32..76]), id }
    }

    /// The acceptor's answer, which proves that it knows the secret too.
    pub(crate) fn welcome(&self, secret: &Secret, accepting: &Nonce, memory: MemoryToken) -> [u8; WELCOME] {
        let said = memory.bytes();
        let mut bytes = [0; WELCOME];
        bytes[..MemoryToken::BYTES].copy_from_slice(&said);
        let mac = mac(secret, &[b"accept", accepting, &self.said(), &said]);
        bytes[MemoryToken::BYTES..].copy_from_slice(&mac.finalize().into_bytes());
        bytes
    }

    /// The acceptor's memory, or `None` when it does not know the secret.
    pub(crate) fn read_welcome(
        &self,
        secret: &Secret,
        accepting: &Nonce,
        bytes: &[u8; WELCOME],
    ) -> Option<MemoryToken> {
        let (said, proof) = bytes.split_at(MemoryToken::BYTES);
        mac(secret, &[b"accept", accepting, &self.said(), said]).verify_slice(proof).ok()?;
        Some(MemoryToken::read(said))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCEPTING: Nonce = [1; 32];

    fn memory(byte: u8) -> MemoryToken {
        MemoryToken { pid: u32::from(byte), address: u64::from(byte) << 33, token: [byte; 32] }
    }

    fn hello() -> Hello {
        let id = LinkId::new(Epoch(3), "world", Rank(2), Rank(0));
        Hello { nonce: [2; 32], memory: memory(3), id }
    }

    #[test]
    fn both_ends_convince_each_other_with_the_same_secret() {
        let secret = Secret::new([7; 32]);
        let heard = read_challenge(&challenge(&ACCEPTING)).unwrap();
        assert_eq!(heard, ACCEPTING);
        let said = Hello::decode(&secret, &ACCEPTING, &hello().encode(&secret, &heard)).unwrap();
        assert_eq!(said, hello());
        let welcome = said.welcome(&secret, &ACCEPTING, memory(4));
        assert_eq!(hello().read_welcome(&secret, &heard, &welcome), Some(memory(4)));
    }

    #[test]
    fn another_secret_another_end_or_a_changed_bit_is_refused() {
        let secret = Secret::new([7; 32]);
        let good = hello().encode(&secret, &ACCEPTING);
        assert!(Hello::decode(&Secret::new([8; 32]), &ACCEPTING, &good).is_none());
        assert!(Hello::decode(&secret, &[9; 32], &good).is_none(), "a recorded hello opens no second link");
        for bit in 0..HELLO * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Hello::decode(&secret, &ACCEPTING, &bad).is_none(), "bit {bit}");
        }
        let welcome = hello().welcome(&secret, &ACCEPTING, memory(4));
        for bit in 0..WELCOME * 8 {
            let mut bad = welcome;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(hello().read_welcome(&secret, &ACCEPTING, &bad).is_none(), "bit {bit}");
        }
        let other = Hello { id: LinkId::new(Epoch(4), "world", Rank(2), Rank(0)), ..hello() };
        let refused = other.read_welcome(&secret, &ACCEPTING, &welcome);
        assert!(refused.is_none(), "an epoch cannot stand in for another");
    }

    #[test]
    fn a_stranger_is_told_nothing_of_the_process() {
        let told = challenge(&ACCEPTING);
        assert_eq!(told[..8], MAGIC);
        assert_eq!(told[8..], ACCEPTING, "a random number");
    }
}
