//! The reductions that NCCL lacks or defines differently, and the kernels that run before and after NCCL's part.

use crate::device::nccl::sys::{ncclDataType_t, ncclRedOp_t};
use crate::device::{Address, Device, Kernel, Launch, Stream};
use crate::error::Result;
use crate::types::dtype::DType;
use crate::types::operation::ReduceOp;

/// CUDA C++ without headers.
const SOURCE: &str = include_str!("reductions.cu");
const THREADS: u32 = 256;
/// More blocks than this do not fit a GPU at once; each block then processes several parts.
const BLOCKS: u32 = 1024;

/// NCCL's sum, for reductions that kernels of this crate finish and for barriers.
pub(super) const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;

/// A kernel that must follow NCCL's part of a call.
pub(super) enum PostKernel {
    /// Divide each element by a number of ranks.
    Divide(Elements, usize),
    /// Turn keys, at this address, into the elements; true for the keys of minima.
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

/// Returns NCCL's reduction.
pub(super) const fn nccl_op(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Product => ncclRedOp_t::ncclProd,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Avg => ncclRedOp_t::ncclAvg,
    }
}

/// Returns NCCL's element type.
pub(super) const fn nccl_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::I8 => ncclDataType_t::ncclInt8,
        DType::U8 => ncclDataType_t::ncclUint8,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::U32 => ncclDataType_t::ncclUint32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::U64 => ncclDataType_t::ncclUint64,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
    }
}

/// Returns the type of the keys of a float type.
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

/// Elements in the memory of the GPU. The caller of this module guarantees that they stay until the stream has passed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Elements {
    pub(super) address: Address,
    pub(super) dtype: DType,
    pub(super) count: usize,
}

fn divide(device: &Device, stream: &Stream, x: Elements, ranks: usize) -> Result<()> {
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
    let kernel = kernel(device, from.dtype, smallest, "to_keys")?;
    let count = from.count as u64;
    // SAFETY: two addresses and a 64-bit number; the keys' memory is scratch of that many keys.
    unsafe { kernel.launch(stream, launch(from.count), &[&from.address, &keys, &count]) }?;
    Ok(())
}

fn from_keys(device: &Device, stream: &Stream, keys: Address, to: Elements, smallest: bool) -> Result<()> {
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
