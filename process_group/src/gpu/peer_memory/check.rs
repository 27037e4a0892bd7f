//! Checks before the first call that the kernels produce correct values on these GPUs.

use half::{bf16, f16};

use super::entry::Entry;
use super::kernels::{CHECKED, Kernels, Norm, Part};
use super::shape::HOPPER;
use super::shared::Report;
use crate::device::{Device, DeviceBuffer, DeviceError};
use crate::paths::gpu::PEER_TYPES;
use crate::types::dtype::DType;

/// The tested sizes: whole vectors of several rows; parts of vectors, not aligned; and a row that takes a cluster, of which one
/// block has no work.
const SIZES: [Size; 3] = [
    Size { count: 1000, columns: 200, offset: 0 },
    Size { count: 1003, columns: 0, offset: 1 },
    Size { count: 5120, columns: 5120, offset: 0 },
];
/// Bytes of the longest array of the largest type.
const MOST: usize = 5120 * size_of::<f32>();
const EPSILON: f32 = 1e-5;
/// The rank that broadcasts.
const ROOT: usize = 1;

#[derive(Clone, Copy)]
struct Size {
    count: usize,
    /// Number of elements of a row; 0 if it is not a whole number of rows.
    columns: usize,
    /// Number of elements by which the arrays are misaligned.
    offset: usize,
}

impl Size {
    fn suits(self, entry: Entry, has_clusters: bool) -> bool {
        let is_whole_rows = self.columns > 0 && (self.columns < 512 || has_clusters);
        is_whole_rows || !entry.has_norm()
    }
}

/// Runs every kernel on every type, and compares all values. All ranks call this at the same time.
pub(super) fn check(kernels: &Kernels, device: &Device, (position, ranks): (usize, usize)) -> Report<()> {
    // The array or all chunks, the residual and the weights.
    let bytes = (ranks.max(2) + 3) * MOST;
    let has_clusters = device.info().capability >= HOPPER;
    let buffer = || DeviceBuffer::new(device, DType::U8, bytes);
    let memory = buffer().and_then(|input| Ok((input, buffer()?)));
    let memory = memory.map_err(|error| error.to_string())?;
    // Terms of invariant numerics are f32, next to a residual of another type.
    let suit = |entry: Entry, dtype, residual| dtype == residual || entry.has_norm() && dtype == DType::F32;
    let types = PEER_TYPES.into_iter().flat_map(|dtype| PEER_TYPES.map(|residual| (dtype, residual)));
    for (dtype, residual_type) in types {
        for entry in Entry::ALL.into_iter().filter(|entry| suit(*entry, dtype, residual_type)) {
            for size in SIZES.into_iter().filter(|size| size.suits(entry, has_clusters)) {
                let memory = &memory;
                let trial = Trial { kernels, device, memory, position, ranks, dtype, residual_type, size };
                let wrong = trial.run(entry).map_err(|error| error.to_string())?;
                let (name, path, count) = (entry.name(), entry.path(), size.count);
                if kernels.gave_up() {
                    return Err(format!("its check of {path} ({name}) got no answer in {CHECKED:?}"));
                }
                if let Some(wrong) = wrong {
                    return Err(format!("its check of {path} ({name} of {count} {dtype}) failed: {wrong}"));
                }
            }
        }
    }
    Ok(())
}

/// One kernel with one type, and another one or the same for the residual and the normalised rows.
struct Trial<'a> {
    kernels: &'a Kernels,
    device: &'a Device,
    memory: &'a (DeviceBuffer, DeviceBuffer),
    position: usize,
    ranks: usize,
    dtype: DType,
    residual_type: DType,
    size: Size,
}

/// Returns small numbers that differ from rank to rank: all sums are exact in every type.
fn operand(rank: usize, i: usize) -> f32 {
    (i % 7 + rank) as f32 - 3.0
}

fn weight(i: usize) -> f32 {
    (i % 5) as f32 - 2.0
}

impl Trial<'_> {
    /// Returns a description of the error, if there is one.
    fn run(&self, entry: Entry) -> Result<Option<String>, DeviceError> {
        let (n, me, size) = (self.ranks, self.position, self.dtype.size());
        let Size { count, columns, offset } = self.size;
        let off = (offset * size) as u64;
        let (input, output) = (self.memory.0.address() + off, self.memory.1.address() + off);
        let chunks = if entry == Entry::ReduceScatter { n } else { 1 };
        let values =
            |rank: usize, count: usize| -> Vec<f32> { (0..count).map(|i| operand(rank, i)).collect() };
        // The array, the residual and the weights.
        let mut bytes = encode(self.dtype, &values(me, chunks * count));
        let residual_at = input + bytes.len() as u64;
        bytes.extend(encode(self.residual_type, &values(1, count)));
        let norm = entry.has_norm().then_some(Norm {
            residual: residual_at,
            weight: input + bytes.len() as u64,
            columns: columns as u32,
            epsilon: EPSILON,
            narrow: self.residual_type as u64,
        });
        bytes.extend((0..columns).flat_map(|i| weight(i).to_ne_bytes()));
        let stream = self.device.stream();
        // SAFETY: all of it fits the buffers, which live until the stream is drained; all ranks make the same launches.
        unsafe {
            stream.copy_from_host(input, &bytes)?;
            stream.fill(self.memory.1.address(), 0x77, self.memory.1.bytes())?;
            stream.drain()?;
            let part = Part { input, output, count, pitch: count, dtype: self.dtype, root: ROOT as u32 };
            self.kernels.launch_part(entry, part, norm, CHECKED, stream)?;
        }
        stream.drain()?;
        let read = |from, elements: usize| -> Result<Vec<f32>, DeviceError> {
            let mut bytes = vec![0u8; elements * self.residual_type.size()];
            // SAFETY: within the buffers; drained before the bytes are looked at.
            unsafe { stream.copy_to_host(&mut bytes, from) }?;
            stream.drain()?;
            Ok(decode(self.residual_type, &bytes))
        };
        let sum = |i: usize| (0..n).map(|rank| operand(rank, i)).sum::<f32>();
        let got = read(output, if entry == Entry::AllGather { n * count } else { count })?;
        Ok(match entry {
            Entry::OneShot | Entry::TwoShot => differs(&got, sum),
            Entry::ReduceScatter => differs(&got, |i| sum(me * count + i)),
            Entry::AllGather => differs(&got, |i| operand(i / count, i % count)),
            Entry::Broadcast | Entry::ScatterGather => differs(&got, |i| operand(ROOT, i)),
            Entry::AddNorm | Entry::TwoShotAddNorm => {
                let residual = |i: usize| operand(1, i) + sum(i);
                let mut wanted: Vec<f32> = (0..count).map(residual).collect();
                for row in wanted.chunks_mut(columns) {
                    let squares: f32 = row.iter().map(|x| x * x).sum();
                    let scale = (squares / columns as f32 + EPSILON).sqrt();
                    row.iter_mut().enumerate().for_each(|(i, x)| *x = *x / scale * weight(i));
                }
                differs(&read(residual_at, count)?, residual).or_else(|| {
                    let is_near = |(got, want): (&f32, &f32)| (got - want).abs() <= 0.01 * want.abs();
                    let far = got.iter().zip(&wanted).position(|pair| !is_near(pair))?;
                    Some(format!("element {far} is {}, not {}", got[far], wanted[far]))
                })
            }
        })
    }
}

/// Returns the first element that differs from its expected value.
fn differs(got: &[f32], want: impl Fn(usize) -> f32) -> Option<String> {
    let (i, got) = got.iter().enumerate().find(|(i, got)| **got != want(*i))?;
    Some(format!("element {i} is {got}, not {}", want(i)))
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let each = |of: fn(f32) -> [u8; 2]| values.iter().flat_map(|value| of(*value)).collect();
    match dtype {
        DType::F16 => each(|value| f16::from_f32(value).to_ne_bytes()),
        DType::BF16 => each(|value| bf16::from_f32(value).to_ne_bytes()),
        _ => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let each = |of: fn([u8; 2]) -> f32| bytes.chunks_exact(2).map(|b| of([b[0], b[1]])).collect();
    match dtype {
        DType::F16 => each(|bytes| f16::from_ne_bytes(bytes).to_f32()),
        DType::BF16 => each(|bytes| bf16::from_ne_bytes(bytes).to_f32()),
        _ => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_sums_and_chunks_are_exact_in_every_type() {
        for dtype in PEER_TYPES {
            for n in 2..=8 {
                let sums: Vec<f32> = (0..8 * 5120)
                    .map(|i| (0..n).map(|rank| operand(rank, i)).sum::<f32>() + operand(1, i))
                    .collect();
                assert_eq!(decode(dtype, &encode(dtype, &sums)), sums, "{dtype}, {n} ranks");
            }
        }
    }

    #[test]
    fn the_first_wrong_element_is_named() {
        assert_eq!(differs(&[0.0, 1.0], |i| i as f32), None);
        assert_eq!(differs(&[0.0, 7.0], |i| i as f32).unwrap(), "element 1 is 7, not 1");
    }
}
