//! The decoders of this crate for the fuzz targets. They are not part of the API and may change at any time.

use crate::checkpoint::header;

/// Checks a whole safetensors file: every slice that its header describes is within the file, and its length matches shape and
/// type.
pub fn safetensors(file: &[u8]) {
    let Ok(entries) = header::parse(file) else { return };
    for entry in entries.values() {
        let slice = &file[entry.bytes.clone()];
        if let Some(size) = header::element_size(&entry.dtype) {
            assert_eq!(entry.shape.iter().product::<usize>() * size, slice.len());
        }
    }
}
