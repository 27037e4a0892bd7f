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
    pub(crate) reason: String,
}

impl From<String> for HeaderError {
    fn from(reason: String) -> Self {
        Self { tensor: None, reason }
    }
}

/// Parses the header of a whole file. Every returned range is within the file, and its length matches the shape.
pub(crate) fn parse(file: &[u8]) -> Result<BTreeMap<String, Entry>, HeaderError> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(format!(
            "{} bytes are no safetensors file, whose first 8 are the length of its header; download it again",
            file.len()
        )
        .into());
    };
    let claimed = u64::from_le_bytes(*length);
    if claimed > HEADER_LIMIT {
        return Err(format!(
            "the first 8 bytes claim a header of {claimed} bytes, and no safetensors file has so long a header; download the file \
             again, or convert it to safetensors"
        )
        .into());
    }
    let length = claimed as usize;
    let Some((json, data)) = rest.split_at_checked(length) else {
        return Err(format!(
            "the header claims {claimed} bytes and the file ends before: it is truncated; download it again"
        )
        .into());
    };
    let RawHeader(raw) = serde_json::from_slice(json)
        .map_err(|error| format!("the header is not valid: {error}; download the file again"))?;

    let mut entries = BTreeMap::new();
    for (name, value) in raw {
        if name == "__metadata__" {
            continue;
        }
        let entry = entry(value, data.len(), 8 + length).and_then(|entry| {
            if entries.contains_key(&name) {
                Err("the header has this name twice; the file is corrupt: download it again".into())
            } else {
                Ok(entry)
            }
        });
        match entry {
            Ok(entry) => entries.insert(name, entry),
            Err(reason) => return Err(HeaderError { tensor: Some(name), reason }),
        };
    }
    check_contiguous(&entries, 8 + length, file.len())?;
    Ok(entries)
}

fn entry(value: &RawValue, data: usize, offset: usize) -> Result<Entry, String> {
    let Raw { dtype, shape, data_offsets: (start, end) } = serde_json::from_str(value.get())
        .map_err(|error| format!("the header entry is not valid: {error}; download the file again"))?;
    if start > end {
        return Err(format!(
            "its bytes end at {end}, before they start at {start}; the header is corrupt: download the file again"
        ));
    }
    if end > data {
        return Err(format!(
            "its bytes end at {end} and the file has {data} bytes of data: it is truncated; download it again"
        ));
    }
    if let Some(size) = element_size(&dtype) {
        let bytes = shape.iter().try_fold(size, |a, b| a.checked_mul(*b));
        if bytes != Some(end - start) {
            let bytes = end - start;
            return Err(format!(
                "{dtype} {shape:?} does not fill its {bytes} bytes; the header is corrupt: download the file again"
            ));
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
            let reason = format!(
                "its bytes start at {start} and should start at {expected}, where those before it end; the header is corrupt: \
                 download the file again"
            );
            return Err(HeaderError { tensor: Some(name.clone()), reason });
        }
        expected = entry.bytes.end;
    }
    if expected != end {
        let bytes = end - expected;
        return Err(format!(
            "{bytes} bytes at the end belong to no tensor; the file is corrupt: download it again"
        )
        .into());
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
