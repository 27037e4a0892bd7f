//! The decoders of this crate for the fuzz targets. No API: it may change at any time.

use crate::checkpoint::header;

/// A whole safetensors file: every slice that its header describes lies in it, and is as long as shape and type say.
pub fn safetensors(file: &[u8]) {
    let Ok(entries) = header::parse(file) else { return };
    for entry in entries.values() {
        let slice = &file[entry.bytes.clone()];
        if let Some(size) = header::element_size(&entry.dtype) {
            assert_eq!(entry.shape.iter().product::<usize>() * size, slice.len());
        }
    }
}
