//! The header of a safetensors file, checked to the last byte. Pure.
//!
//! Eight bytes of length (little-endian), then that much JSON: for each tensor its type, shape and byte range in the
//! rest of the file. Written here so that every refusal can name the tensor, and no size in a file is ever trusted.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;

/// The largest header that is read, as the format defines it.
const HEADER_LIMIT: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    /// Name of the element type, as written.
    pub(crate) dtype: String,
    /// Length of each dimension.
    pub(crate) shape: Vec<usize>,
    /// Where its bytes are, from the start of the file.
    pub(crate) bytes: Range<usize>,
}

#[derive(Deserialize)]
struct Raw {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// What is wrong, and with which tensor.
pub(crate) type Flaw = (Option<String>, String);

/// Reads the header of a whole file. Every range returned is within the file and as long as its shape says.
pub(crate) fn parse(file: &[u8]) -> Result<BTreeMap<String, Entry>, Flaw> {
    let whole = |reason: String| (None, reason);
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(whole(format!(
            "{} bytes are no safetensors file; the header length takes 8",
            file.len()
        )));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_LIMIT {
        return Err(whole(format!(
            "the header claims {length} bytes; no safetensors file has so long a header"
        )));
    }
    let length = length as usize;
    let Some((json, data)) = rest.split_at_checked(length) else {
        return Err(whole(format!(
            "the header claims {length} bytes and the file ends before: it is truncated"
        )));
    };
    let raw: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(json).map_err(|e| whole(format!("the header is not valid: {e}")))?;

    let mut entries = BTreeMap::new();
    for (name, value) in raw {
        if name == "__metadata__" {
            continue;
        }
        let entry = entry(value, data.len(), 8 + length).map_err(|reason| (Some(name.clone()), reason))?;
        entries.insert(name, entry);
    }
    contiguous(&entries, 8 + length, file.len())?;
    Ok(entries)
}

fn entry(value: serde_json::Value, data: usize, offset: usize) -> Result<Entry, String> {
    let raw: Raw =
        serde_json::from_value(value).map_err(|e| format!("the header entry is not valid: {e}"))?;
    let (start, end) = raw.data_offsets;
    if start > end {
        return Err(format!("its bytes end at {end}, before they start at {start}"));
    }
    if end > data {
        return Err(format!("its bytes end at {end} and the file has {data} bytes of data: it is truncated"));
    }
    if let Some(size) = element_size(&raw.dtype) {
        let bytes = raw.shape.iter().try_fold(size, |a, b| a.checked_mul(*b));
        if bytes != Some(end - start) {
            return Err(format!(
                "{} {:?} does not fill its {} bytes; the header is corrupt",
                raw.dtype,
                raw.shape,
                end - start
            ));
        }
    }
    Ok(Entry { dtype: raw.dtype, shape: raw.shape, bytes: offset + start..offset + end })
}

fn contiguous(entries: &BTreeMap<String, Entry>, start: usize, end: usize) -> Result<(), Flaw> {
    let mut order: Vec<_> = entries.iter().collect();
    order.sort_by_key(|(_, e)| (e.bytes.start, e.bytes.end));
    let mut at = start;
    for (name, entry) in order {
        if entry.bytes.start != at {
            let reason = format!(
                "its bytes start at {} and should start at {at}; the header is corrupt",
                entry.bytes.start
            );
            return Err((Some(name.clone()), reason));
        }
        at = entry.bytes.end;
    }
    if at != end {
        return Err((
            None,
            format!("{} bytes at the end belong to no tensor; the file is corrupt", end - at),
        ));
    }
    Ok(())
}

/// Bytes of one element of the types that have whole bytes.
pub(crate) fn element_size(dtype: &str) -> Option<usize> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => Some(1),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "F32" | "I32" | "U32" => Some(4),
        "F64" | "I64" | "U64" | "C64" => Some(8),
        _ => None,
    }
}
