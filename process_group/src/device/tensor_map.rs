//! Descriptions of tensors, by which kernels copy boxes of them into shared memory (TMA).

use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys;

use super::error::DeviceError;
use super::gpu::Device;
use super::symbols::{Address, foreign};
use crate::types::dtype::DType;

/// A description of a tensor of 16-bit elements. Kernels take it as a `__grid_constant__` of 128 bytes.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(128))]
pub struct TensorMap([u64; 16]);

impl TensorMap {
    /// Describes a tensor with `lengths` of its axes, innermost first, from `address` on. Elements of the innermost axis follow each
    /// other; `strides` are the distances of elements of the others. Kernels copy boxes of the two innermost axes, of the lengths
    /// `area`; rows of a box have 128 bytes in shared memory, whose parts of 16 bytes are swizzled.
    ///
    /// # Errors
    /// When the driver refuses it: address and strides must be multiples of 16 bytes, and an axis of a box has at most 256 elements.
    pub fn new(
        device: &Device,
        address: Address,
        dtype: DType,
        lengths: [u64; 3],
        strides: [u64; 2],
        area: [u32; 2],
    ) -> Result<Self, DeviceError> {
        let element = match dtype {
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            other => {
                return Err(DeviceError::invalid(format!(
                    "a tensor map has elements of 16 bits, not {other}"
                )));
            }
        };
        let strides = strides.map(|stride| stride * dtype.size() as u64);
        let (area, steps) = ([area[0], area[1], 1], [1; 3]);
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let context = &device.context;
        // SAFETY: all arrays have three axes, or two strides, and live through the call; the address is not read.
        let code = unsafe {
            foreign!(
                driver,
                context.driver.cuTensorMapEncodeTiled(
                    &raw mut map,
                    element,
                    3,
                    address as _,
                    lengths.as_ptr(),
                    strides.as_ptr(),
                    area.as_ptr(),
                    steps.as_ptr(),
                    sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                    sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                )
            )
        };
        context.check("cuTensorMapEncodeTiled", code)?;
        Ok(Self(map.opaque))
    }
}
