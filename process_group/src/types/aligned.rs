//! Scratch memory for any element type.

/// Bytes aligned for every element type, grown and never shrunk.
#[derive(Default)]
pub(crate) struct AlignedBytes {
    words: Vec<u64>,
}

impl AlignedBytes {
    /// Returns the first `length` bytes; their content is unspecified.
    pub(crate) fn first(&mut self, length: usize) -> &mut [u8] {
        let words = length.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        &mut bytemuck::cast_slice_mut(&mut self.words)[..length]
    }
}
