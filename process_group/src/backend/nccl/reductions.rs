//! The reductions that NCCL lacks, or means otherwise: which they are, and the kernels that come before and behind NCCL's
//! part.

use crate::device::{Address, Device, Kernel, Launch, Stream};
use crate::dtype::DType;
use crate::error::Result;
use crate::operation::ReduceOp;

/// CUDA C++ without headers.
const SOURCE: &str = include_str!("reductions.cu");
const THREADS: u32 = 256;
/// More blocks than this do not fit a GPU at once; the kernels walk on.
const BLOCKS: u32 = 1024;

/// `ncclSum`, `ncclProd`, `ncclMax`, `ncclMin`, `ncclAvg`.
pub(super) const SUM: i32 = 0;
const PRODUCT: i32 = 1;
const MAX: i32 = 2;
const MIN: i32 = 3;
const AVG: i32 = 4;

/// A kernel that must come behind NCCL's part of a call.
pub(super) enum PostKernel {
    /// Divide each element by a number of ranks.
    Divide(Elements, usize),
    /// Turn keys, at this address, into the elements; whether they are the keys of minima.
    FromKeys(Address, Elements, bool),
}

impl PostKernel {
    pub(super) fn launch(self, device: &Device, stream: &Stream) -> Result<()> {
        match self {
            Self::Divide(elements, ranks) => divide(device, stream, elements, ranks),
            Self::FromKeys(keys, to, smallest) => from_keys(device, stream, keys, to, smallest),
        }
    }
}

/// NCCL's number of a reduction.
pub(super) const fn number(op: ReduceOp) -> i32 {
    match op {
        ReduceOp::Sum => SUM,
        ReduceOp::Product => PRODUCT,
        ReduceOp::Max => MAX,
        ReduceOp::Min => MIN,
        ReduceOp::Avg => AVG,
    }
}

/// NCCL's number of an element type.
pub(super) const fn nccl_type(dtype: DType) -> i32 {
    match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

/// The type of the keys of a float type.
pub(super) const fn key_type(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::I64,
        _ => DType::I32,
    }
}

fn kernel(device: &Device, dtype: DType, smallest: bool, name: &str) -> Result<Kernel> {
    let kind = format!("-DKIND={}", dtype as u8);
    let smallest = format!("-DSMALLEST={}", u8::from(smallest));
    Ok(device.kernels().module("reductions.cu", SOURCE, &[&kind, &smallest])?.kernel(name)?)
}

fn launch(count: usize) -> Launch {
    let mut launch = Launch::over(count, THREADS);
    launch.grid[0] = launch.grid[0].min(BLOCKS);
    launch
}

/// Elements in the memory of the GPU, with what the caller of this module promises: they stay until the stream is past.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Elements {
    pub(super) address: Address,
    pub(super) dtype: DType,
    pub(super) count: usize,
}

fn divide(device: &Device, stream: &Stream, x: Elements, ranks: usize) -> Result<()> {
    if x.count == 0 {
        return Ok(());
    }
    let kernel = kernel(device, x.dtype, false, "divide")?;
    let (count, ranks) = (x.count as u64, ranks as u32);
    // SAFETY: the kernel takes an address, a 64-bit and a 32-bit number; the elements are a call's output.
    unsafe { kernel.launch(stream, launch(x.count), &[&x.address, &count, &ranks]) }?;
    Ok(())
}

pub(super) fn to_keys(
    device: &Device,
    stream: &Stream,
    from: Elements,
    keys: Address,
    smallest: bool,
) -> Result<()> {
    if from.count == 0 {
        return Ok(());
    }
    let kernel = kernel(device, from.dtype, smallest, "to_keys")?;
    let count = from.count as u64;
    // SAFETY: two addresses and a 64-bit number; the keys' memory is scratch of that many keys.
    unsafe { kernel.launch(stream, launch(from.count), &[&from.address, &keys, &count]) }?;
    Ok(())
}

fn from_keys(device: &Device, stream: &Stream, keys: Address, to: Elements, smallest: bool) -> Result<()> {
    if to.count == 0 {
        return Ok(());
    }
    let kernel = kernel(device, to.dtype, smallest, "from_keys")?;
    let count = to.count as u64;
    // SAFETY: as above, in the other direction; the elements are a call's output.
    unsafe { kernel.launch(stream, launch(to.count), &[&keys, &to.address, &count]) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_number_the_types_as_the_table_does() {
        let kinds: Vec<u8> = DType::ALL.iter().map(|d| *d as u8).collect();
        assert_eq!(kinds, (0..10).collect::<Vec<u8>>());
        assert_eq!((DType::BF16 as u8, DType::I8 as u8, DType::U64 as u8), (3, 4, 9));
    }
}
