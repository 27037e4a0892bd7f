//! A hash by which ranks compare what is too long to send.

/// The FNV-1a hash of some bytes: the same in every build, and enough to find what differs by mistake.
pub(crate) fn digest(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}
