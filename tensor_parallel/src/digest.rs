//! A hash with which ranks compare data that is too long to send.

/// Computes the FNV-1a hash of bytes. It is the same in every build, and sufficient to detect accidental differences.
pub(crate) fn digest(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}
