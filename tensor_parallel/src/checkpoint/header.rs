//! The header of a safetensors file, validated completely. Pure.
//!
//! A file starts with the length of the header in eight bytes (little-endian). The header is JSON with the type, shape and byte
//! range of each tensor in the rest of the file. This parser is our own, so that every error can name the tensor, and no size in
//! a file is trusted.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::error::CheckpointError;

/// The maximum header size that the format allows.
const HEADER_LIMIT: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    /// Name of the element type, as written.
    pub(crate) dtype: String,
    /// Length of each dimension.
    pub(crate) shape: Vec<usize>,
    /// Range of its bytes, relative to the start of the file.
    pub(crate) bytes: Range<usize>,
}

#[derive(Deserialize)]
struct Raw {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// Names and values in the order of the file. A map would keep only one of two equal names, and parsed values would take many
/// times the memory of the header.
struct RawHeader<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Deserialize<'a> for RawHeader<'a> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;

        impl<'a> Visitor<'a> for Names {
            type Value = RawHeader<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(RawHeader(entries))
            }
        }

        deserializer.deserialize_map(Names)
    }
}

/// An error in a header, and the tensor that it concerns, if any.
#[derive(Debug)]
pub(crate) struct HeaderError {
    pub(crate) tensor: Option<String>,
    pub(crate) source: CheckpointError,
}

impl From<CheckpointError> for HeaderError {
    fn from(source: CheckpointError) -> Self {
        Self { tensor: None, source }
    }
}

/// Parses the header of a whole file. Every returned range is within the file, and its length matches the shape.
pub(crate) fn parse(file: &[u8]) -> Result<BTreeMap<String, Entry>, HeaderError> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(CheckpointError::TooShort { bytes: file.len() }.into());
    };
    let claimed = u64::from_le_bytes(*length);
    if claimed > HEADER_LIMIT {
        return Err(CheckpointError::HeaderTooLong { claimed }.into());
    }
    let length = claimed as usize;
    let Some((json, data)) = rest.split_at_checked(length) else {
        return Err(CheckpointError::HeaderTruncated { claimed }.into());
    };
    let RawHeader(raw) = serde_json::from_slice(json).map_err(CheckpointError::Header)?;

    let mut entries = BTreeMap::new();
    for (name, value) in raw {
        if name == "__metadata__" {
            continue;
        }
        let entry = entry(value, data.len(), 8 + length).and_then(|entry| {
            if entries.contains_key(&name) { Err(CheckpointError::DuplicateName) } else { Ok(entry) }
        });
        match entry {
            Ok(entry) => entries.insert(name, entry),
            Err(source) => return Err(HeaderError { tensor: Some(name), source }),
        };
    }
    check_contiguous(&entries, 8 + length, file.len())?;
    Ok(entries)
}

fn entry(value: &RawValue, data: usize, offset: usize) -> Result<Entry, CheckpointError> {
    let Raw { dtype, shape, data_offsets: (start, end) } =
        serde_json::from_str(value.get()).map_err(CheckpointError::HeaderEntry)?;
    if start > end {
        return Err(CheckpointError::ReversedRange { start, end });
    }
    if end > data {
        return Err(CheckpointError::DataTruncated { end, data });
    }
    if let Some(size) = element_size(&dtype) {
        let bytes = shape.iter().try_fold(size, |a, b| a.checked_mul(*b));
        if bytes != Some(end - start) {
            return Err(CheckpointError::WrongLength { dtype, shape, bytes: end - start });
        }
    }
    Ok(Entry { dtype, shape, bytes: offset + start..offset + end })
}

/// Returns an error if there are gaps, overlaps, or bytes after the last tensor.
fn check_contiguous(entries: &BTreeMap<String, Entry>, start: usize, end: usize) -> Result<(), HeaderError> {
    let mut order: Vec<_> = entries.iter().collect();
    order.sort_by_key(|(_, e)| (e.bytes.start, e.bytes.end));
    let mut expected = start;
    for (name, entry) in order {
        let start = entry.bytes.start;
        if start != expected {
            let source = CheckpointError::NotContiguous { start, expected };
            return Err(HeaderError { tensor: Some(name.clone()), source });
        }
        expected = entry.bytes.end;
    }
    if expected != end {
        return Err(CheckpointError::TrailingBytes { bytes: end - expected }.into());
    }
    Ok(())
}

/// Returns the size of an element in bytes, or `None` if it is not a whole number of bytes.
pub(crate) fn element_size(dtype: &str) -> Option<usize> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => Some(1),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "F32" | "I32" | "U32" => Some(4),
        "F64" | "I64" | "U64" | "C64" => Some(8),
        _ => None,
    }
}
