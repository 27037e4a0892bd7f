//! The header before every payload: a fingerprint of the call of the payload.
//!
//! 64 bytes, little endian: kind, operation, reduction, element type, composed call u32, root u32, rank u32 (the sender),
//! sequence u64, count u64, payload length u64, the algorithm's name and zeros up to 24 bytes.

use super::fingerprint;
use crate::schedule::Algorithm;
use crate::types::operation::CallFingerprint;
use crate::types::rank::Rank;

/// Bytes of a header: a cache line, so that the payload after it has the alignment of an array that begins with a line:
/// the kernel copies aligned bytes into and out of sockets faster.
pub(crate) const HEADER: usize = 64;
/// Maximum length of a reason that an abort contains.
pub(crate) const MAX_REASON: usize = 2048;
/// Bytes of a name of an algorithm, with zeros behind it.
const NAME: usize = 24;
/// The names of [`Algorithm::ALL`]. A longer one does not compile.
const NAMES: [[u8; NAME]; Algorithm::ALL.len()] = {
    let mut names = [[0; NAME]; Algorithm::ALL.len()];
    let mut i = 0;
    while i < names.len() {
        let name = Algorithm::ALL[i].name().as_bytes();
        names[i].split_at_mut(name.len()).0.copy_from_slice(name);
        i += 1;
    }
    names
};

/// The purpose of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Part of a call; the payload follows.
    Data,
    /// The sender has given up; the payload is the reason, in UTF-8.
    Abort,
    /// A question: "I have waited too long in this call: where are you?"
    Query,
    /// An answer: "I am waiting in this call."
    Answer,
    /// The sender leaves in good order.
    Goodbye,
}

impl Kind {
    /// Returns the maximum length of the payload.
    const fn longest(self) -> usize {
        match self {
            Self::Data => usize::MAX,
            Self::Abort => MAX_REASON,
            Self::Query | Self::Answer | Self::Goodbye => 0,
        }
    }
}

/// All kinds, in the order of their numbers.
const KINDS: [Kind; 5] = [Kind::Data, Kind::Abort, Kind::Query, Kind::Answer, Kind::Goodbye];

/// A decoded header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) fingerprint: CallFingerprint,
    pub(crate) algorithm: Algorithm,
    pub(crate) sequence: u64,
    /// Number of bytes of the payload, which follow on the link.
    pub(crate) length: usize,
    /// The rank that sent the frame; in an abort, the rank that gave up first.
    pub(crate) rank: Rank,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let call = fingerprint::pack(&self.fingerprint);
        let mut bytes = [0; HEADER];
        bytes[0] = self.kind as u8;
        bytes[1..4].copy_from_slice(&call[..3]);
        bytes[4..8].copy_from_slice(&call[16..20]);
        bytes[8..12].copy_from_slice(&call[4..8]);
        bytes[12..16].copy_from_slice(&self.rank.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&call[8..16]);
        bytes[32..40].copy_from_slice(&(self.length as u64).to_le_bytes());
        bytes[40..].copy_from_slice(&NAMES[self.algorithm as usize]);
        bytes
    }

    /// Returns `None` for bytes that no rank of this version sends.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let mut call = [0; fingerprint::BYTES];
        call[..3].copy_from_slice(&bytes[1..4]);
        call[4..8].copy_from_slice(&bytes[8..12]);
        call[8..16].copy_from_slice(&bytes[24..32]);
        call[16..20].copy_from_slice(&bytes[4..8]);
        let length = usize::try_from(u64_at(32)).ok()?;
        let kind = *KINDS.get(usize::from(bytes[0]))?;
        let header = Self {
            kind,
            fingerprint: fingerprint::unpack(&call)?,
            algorithm: Algorithm::ALL[NAMES.iter().position(|name| bytes[40..] == *name)?],
            sequence: u64_at(16),
            length,
            rank: Rank(u32_at(12)),
        };
        (length <= kind.longest()).then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::wire::fingerprint::any_fingerprint;
    use proptest::prelude::*;

    /// Kind, operation, reduction and element type: mostly those that exist.
    fn any_bytes() -> impl Strategy<Value = [u8; 4]> {
        (0..=5u8, 0..=11u8, 0..=5u8, 0..=10u8).prop_map(<[u8; 4]>::from)
    }

    proptest! {
        #[test]
        fn any_header_of_bytes_decode_to_what_encodes_to_them_again_or_to_nothing(
            mut bytes: [u8; HEADER], call in any_bytes(), name in 0..=NAMES.len(),
            length in prop_oneof![Just(0), 0..2 * MAX_REASON as u64],
        ) {
            bytes[..4].copy_from_slice(&call);
            bytes[32..40].copy_from_slice(&length.to_le_bytes());
            if let Some(name) = NAMES.get(name) {
                bytes[40..].copy_from_slice(name);
            }
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(Header::decode(&header.encode()), Some(header));
            }
        }

        #[test]
        fn headers_survive_the_wire(
            kind in prop::sample::select(&KINDS[..]), fingerprint in any_fingerprint(),
            algorithm in prop::sample::select(&Algorithm::ALL[..]), sequence: u64, length: usize, rank: u32,
        ) {
            let (length, rank) = (length.min(kind.longest()), Rank(rank));
            let header = Header { kind, fingerprint, algorithm, sequence, length, rank };
            prop_assert_eq!(Header::decode(&header.encode()), Some(header));
        }
    }

    #[test]
    fn fuzzing_starts_from_whole_headers() {
        for seed in ["all_reduce", "abort_and_goodbye"] {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fuzz/seeds/frames");
            let bytes = std::fs::read(format!("{folder}/{seed}")).unwrap();
            assert!(
                bytes.as_chunks::<HEADER>().0.iter().all(|bytes| Header::decode(bytes).is_some()),
                "{seed}"
            );
        }
    }
}
