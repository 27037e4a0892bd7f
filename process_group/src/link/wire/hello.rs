//! The beginning of a link: both ends prove that they know the job's secret, before either trusts any other byte.
//!
//! ```text
//! acceptor → dialler   challenge  "RYZL" version protection(1) 0 0  nonce_a(32)                                40 bytes
//! dialler  → acceptor  proof      "RYZL" version protection(1) 0 0  nonce_d(32)  mac(32)                       72 bytes
//! acceptor → dialler   reply      mac(32)                                                                      32 bytes
//!                      TLS 1.3, if both ends say that they encrypt
//! dialler  → acceptor  hello      epoch(8) group(32) from(4) to(4) mac(32)                                     80 bytes
//! acceptor → dialler   welcome    mac(32)                                                                      32 bytes
//! ```
//! `mac` is HMAC-SHA-256 under the secret over a label, all earlier bytes and the bytes that it protects. In the last two it also
//! covers the channel's binding: if a third party decrypts two connections between the ends, these have two bindings, so neither
//! end accepts the other's proof. All lengths are fixed, and the MAC is checked before any field is read. An end that does not know
//! the secret learns random numbers.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::link::security::{Binding, Protection};
use crate::membership::roster::Secret;
use crate::types::rank::{Epoch, Rank};

/// First bytes of a data link, with the version of everything in `wire`, and of control messages.
const MAGIC: [u8; 5] = *b"RYZL\x0e";
/// Length of the magic bytes and the other bytes before a nonce.
pub(crate) const PREFACE: usize = 8;

pub(crate) const CHALLENGE: usize = 40;
pub(crate) const CLIENT_PROOF: usize = 72;
pub(crate) const REPLY: usize = 32;
pub(crate) const HELLO: usize = 80;
pub(crate) const WELCOME: usize = 32;

pub(crate) type Nonce = [u8; 32];

/// Identity of a link.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct LinkId {
    pub(crate) epoch: Epoch,
    /// Digest of the group's name.
    pub(crate) group: [u8; 32],
    /// The dialling rank, as a global rank.
    pub(crate) from: Rank,
    /// The accepting rank, as a global rank.
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

pub(crate) fn challenge(protection: Protection, nonce: &Nonce) -> [u8; CHALLENGE] {
    let mut bytes = [0; CHALLENGE];
    bytes[..5].copy_from_slice(&MAGIC);
    bytes[5] = protection.byte();
    bytes[PREFACE..].copy_from_slice(nonce);
    bytes
}

/// Returns the protection of the other end, or `None` if it is not a rank of this version.
pub(crate) fn read_preface(bytes: [u8; PREFACE]) -> Option<Protection> {
    let is_ours = bytes[..5] == MAGIC && bytes[6..] == [0, 0];
    is_ours.then(|| Protection::from_byte(bytes[5])).flatten()
}

/// The bytes that both ends have sent in clear: the challenge, and the proof that answers it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Opening([u8; 2 * CHALLENGE]);

impl Opening {
    fn new(challenge: &[u8; CHALLENGE], said: &[u8]) -> Self {
        let mut bytes = [0; 2 * CHALLENGE];
        bytes[..CHALLENGE].copy_from_slice(challenge);
        bytes[CHALLENGE..].copy_from_slice(said);
        Self(bytes)
    }

    /// Creates the dialler's opening, with the proof to send.
    pub(crate) fn prove_client(
        secret: &Secret,
        challenge: &[u8; CHALLENGE],
        protection: Protection,
        nonce: &Nonce,
    ) -> ([u8; CLIENT_PROOF], Self) {
        // It has the form of a challenge, in the other direction.
        let opening = Self::new(challenge, &self::challenge(protection, nonce));
        let mut bytes = [0; CLIENT_PROOF];
        bytes[..CHALLENGE].copy_from_slice(&opening.0[CHALLENGE..]);
        bytes[CHALLENGE..].copy_from_slice(&mac(secret, &[b"proof", &opening.0]).finalize().into_bytes());
        (bytes, opening)
    }

    /// Creates the acceptor's opening, from the received proof. Returns `None` if the dialler does not know the secret.
    pub(crate) fn verify_client(
        secret: &Secret,
        challenge: &[u8; CHALLENGE],
        proof: &[u8; CLIENT_PROOF],
    ) -> Option<Self> {
        let (said, proof) = proof.split_at(CHALLENGE);
        let opening = Self::new(challenge, said);
        // Compares in constant time.
        mac(secret, &[b"proof", &opening.0]).verify_slice(proof).ok()?;
        Some(opening)
    }

    /// Returns the acceptor's proof that it has received the proof, and has sent the challenge that the dialler received.
    pub(crate) fn reply(&self, secret: &Secret) -> [u8; REPLY] {
        mac(secret, &[b"reply", &self.0]).finalize().into_bytes().into()
    }

    /// Returns true if the acceptor knows the secret, and its challenge was not changed.
    pub(crate) fn is_reply(&self, secret: &Secret, reply: &[u8; REPLY]) -> bool {
        mac(secret, &[b"reply", &self.0]).verify_slice(reply).is_ok()
    }
}

/// A dialler's first message inside the channel, after it has proved itself: the link that it wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello(pub(crate) LinkId);

impl Hello {
    const SAID: usize = HELLO - 32;

    pub(crate) fn encode(&self, secret: &Secret, opening: &Opening, binding: &Binding) -> [u8; HELLO] {
        let said = self.0.bytes();
        let mut bytes = [0; HELLO];
        bytes[..Self::SAID].copy_from_slice(&said);
        let mac = mac(secret, &[b"dial", &opening.0, binding, &said]);
        bytes[Self::SAID..].copy_from_slice(&mac.finalize().into_bytes());
        bytes
    }

    /// Returns `None` if the dialler does not know the secret, or is not the other end of this channel.
    pub(crate) fn decode(
        secret: &Secret,
        opening: &Opening,
        binding: &Binding,
        bytes: &[u8; HELLO],
    ) -> Option<Self> {
        let (said, proof) = bytes.split_at(Self::SAID);
        // Compares in constant time.
        mac(secret, &[b"dial", &opening.0, binding, said]).verify_slice(proof).ok()?;
        Some(Self::unproven(bytes))
    }

    /// Returns the content of a hello, from any sender.
    pub(crate) fn unproven(said: &[u8; HELLO]) -> Self {
        let u32_at = |at: usize| u32::from_le_bytes(said[at..at + 4].try_into().expect("four bytes"));
        Self(LinkId {
            epoch: Epoch(u64::from_le_bytes(said[..8].try_into().expect("eight bytes"))),
            group: said[8..40].try_into().expect("32 bytes"),
            from: Rank(u32_at(40)),
            to: Rank(u32_at(44)),
        })
    }

    /// Returns the acceptor's answer, which proves that it knows the secret too.
    pub(crate) fn welcome(&self, secret: &Secret, opening: &Opening, binding: &Binding) -> [u8; WELCOME] {
        self.accepts(secret, opening, binding).finalize().into_bytes().into()
    }

    /// Returns true if the acceptor knows the secret, and is the other end of this channel.
    pub(crate) fn is_welcome(
        &self,
        secret: &Secret,
        opening: &Opening,
        binding: &Binding,
        proof: &[u8; WELCOME],
    ) -> bool {
        self.accepts(secret, opening, binding).verify_slice(proof).is_ok()
    }

    fn accepts(&self, secret: &Secret, opening: &Opening, binding: &Binding) -> Hmac<Sha256> {
        mac(secret, &[b"accept", &opening.0, binding, &self.0.bytes()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENCRYPTED: Protection = Protection::Encrypted;
    const BINDING: Binding = [6; 32];

    fn hello() -> Hello {
        Hello(LinkId::new(Epoch(3), "world", Rank(2), Rank(0)))
    }

    fn opening(secret: &Secret) -> Opening {
        Opening::prove_client(secret, &challenge(ENCRYPTED, &[1; 32]), ENCRYPTED, &[2; 32]).1
    }

    #[test]
    fn both_ends_convince_each_other_with_the_same_secret() {
        let secret = Secret::new([7; 32]);
        let challenge = challenge(ENCRYPTED, &[1; 32]);
        assert_eq!(read_preface(*challenge.first_chunk().unwrap()), Some(ENCRYPTED));
        let (proof, dialling) = Opening::prove_client(&secret, &challenge, Protection::Clear, &[2; 32]);
        assert_eq!(read_preface(*proof.first_chunk().unwrap()), Some(Protection::Clear));
        let accepting = Opening::verify_client(&secret, &challenge, &proof).unwrap();
        assert_eq!(accepting, dialling);
        assert!(dialling.is_reply(&secret, &accepting.reply(&secret)));
        let hello = hello();
        let said = hello.encode(&secret, &dialling, &BINDING);
        assert_eq!(Hello::decode(&secret, &accepting, &BINDING, &said), Some(hello));
        let welcome = hello.welcome(&secret, &accepting, &BINDING);
        assert!(hello.is_welcome(&secret, &dialling, &BINDING, &welcome));
    }

    #[test]
    fn another_secret_another_challenge_or_a_changed_bit_of_a_knock_is_refused() {
        let secret = Secret::new([7; 32]);
        let challenge = challenge(ENCRYPTED, &[1; 32]);
        let (good, _) = Opening::prove_client(&secret, &challenge, ENCRYPTED, &[2; 32]);
        assert!(Opening::verify_client(&Secret::new([8; 32]), &challenge, &good).is_none());
        let later = super::challenge(ENCRYPTED, &[9; 32]);
        assert!(
            Opening::verify_client(&secret, &later, &good).is_none(),
            "a recorded proof opens no second link"
        );
        let weaker = super::challenge(Protection::Clear, &[1; 32]);
        assert!(
            Opening::verify_client(&secret, &weaker, &good).is_none(),
            "nobody can change what the acceptor has said"
        );
        for bit in 0..CLIENT_PROOF * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Opening::verify_client(&secret, &challenge, &bad).is_none(), "bit {bit}");
        }
    }

    #[test]
    fn another_secret_another_opening_the_knock_itself_or_a_changed_bit_is_no_reply() {
        let secret = Secret::new([7; 32]);
        let challenge = challenge(ENCRYPTED, &[1; 32]);
        let (proof, mine) = Opening::prove_client(&secret, &challenge, ENCRYPTED, &[2; 32]);
        let good = mine.reply(&secret);
        assert!(!mine.is_reply(&Secret::new([8; 32]), &good));
        assert!(!Opening([9; 80]).is_reply(&secret, &good));
        assert!(!mine.is_reply(&secret, proof.last_chunk().unwrap()), "sent back");
        for bit in 0..REPLY * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!mine.is_reply(&secret, &bad), "bit {bit}");
        }
    }

    #[test]
    fn another_secret_another_opening_another_channel_or_a_changed_bit_is_refused() {
        let secret = Secret::new([7; 32]);
        let mine = opening(&secret);
        let good = hello().encode(&secret, &mine, &BINDING);
        assert!(Hello::decode(&Secret::new([8; 32]), &mine, &BINDING, &good).is_none());
        let other = Opening([9; 80]);
        assert!(
            Hello::decode(&secret, &other, &BINDING, &good).is_none(),
            "a recorded hello opens no second link"
        );
        assert!(
            Hello::decode(&secret, &mine, &[5; 32], &good).is_none(),
            "a hello holds for its own channel"
        );
        for bit in 0..HELLO * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Hello::decode(&secret, &mine, &BINDING, &bad).is_none(), "bit {bit}");
        }
        let welcome = hello().welcome(&secret, &mine, &BINDING);
        assert!(!hello().is_welcome(&secret, &mine, &[5; 32], &welcome), "another channel");
        for bit in 0..WELCOME * 8 {
            let mut bad = welcome;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!hello().is_welcome(&secret, &mine, &BINDING, &bad), "bit {bit}");
        }
        let other = Hello(LinkId::new(Epoch(4), "world", Rank(2), Rank(0)));
        let is_welcome = other.is_welcome(&secret, &mine, &BINDING, &welcome);
        assert!(!is_welcome, "an epoch cannot stand in for another");
    }

    #[test]
    fn an_unauthenticated_client_is_told_nothing_of_the_process() {
        let told = challenge(ENCRYPTED, &[1; 32]);
        assert_eq!(told[..PREFACE], [&MAGIC[..], &[1, 0, 0]].concat());
        assert_eq!(told[PREFACE..], [1; 32], "a random number");
    }
}
