//! Launches of kernels.
//!
//! Each kernel has one safe function, in [`rows`](super::rows), [`linear`](super::linear), [`skinny`](super::skinny),
//! [`gemm`](super::gemm), [`batch`](super::batch) or [`attention`](super::attention). It takes tensors, checks that they contain all
//! that the kernel reads and have room for all that it writes, and documents why the launch is sound. Addresses stay inside a
//! [`KernelCall`].

#![expect(
    unsafe_code,
    reason = "a kernel does with addresses what it wants; whoever launches one must have checked them"
)]

use std::marker::PhantomData;

use ryzanstein_process_group::device::{Argument, Launch};

use super::kernels::{Kernels, Source};
use crate::error::{Error, Result};
use crate::gpu::{Block, DeviceArray};
use crate::tensor::Tensor;

/// Threads per block of kernels that stride over elements.
const THREADS: u32 = 256;
/// The minimum number of elements per thread of such kernels, if there are many elements.
const ELEMENTS: usize = 4;
/// The maximum number of blocks per multiprocessor. With more elements, the blocks stride.
const BLOCKS: u32 = 16;

/// The maximum of the second dimension of a grid.
pub(super) const MOST_BLOCKS_Y: u32 = 65_535;

/// The maximum number of arguments of a kernel.
const MOST_ARGUMENTS: usize = 10;

/// A kernel with its arguments, in the order in which it declares them. It borrows them until it is enqueued; later frees and
/// writes of their memory come later in the same stream.
pub(super) struct KernelCall<'a> {
    kernels: &'a Kernels,
    source: Source,
    name: &'static str,
    arguments: Vec<Box<dyn Argument>>,
    operands: PhantomData<&'a mut Tensor>,
}

impl<'a> KernelCall<'a> {
    /// Adds the address of a tensor that the kernel reads.
    ///
    /// # Errors
    /// Returns an error if the tensor is not in this GPU's memory, or belongs to another stream.
    pub(super) fn read(&mut self, tensor: &'a Tensor) -> Result<&mut Self> {
        let address = self.kernels.here(tensor)?.address();
        Ok(self.value(address))
    }

    /// Adds an address as [`read`](Self::read) does, from this row of the tensor on.
    pub(super) fn read_from(&mut self, tensor: &'a Tensor, row: usize) -> Result<&mut Self> {
        let address = self.kernels.row_of(tensor, row)?;
        Ok(self.value(address))
    }

    /// Adds an address as [`read`](Self::read) does, or a null pointer for `None`.
    pub(super) fn read_optional(&mut self, tensor: Option<&'a Tensor>) -> Result<&mut Self> {
        match tensor {
            Some(tensor) => self.read(tensor),
            None => Ok(self.value(0u64)),
        }
    }

    /// Adds the address of a tensor that the kernel writes, and may read.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read).
    pub(super) fn write(&mut self, tensor: &'a mut Tensor) -> Result<&mut Self> {
        self.write_from(tensor, 0)
    }

    /// Adds an address as [`write`](Self::write) does, from this row of the tensor on.
    pub(super) fn write_from(&mut self, tensor: &'a mut Tensor, row: usize) -> Result<&mut Self> {
        let address = self.kernels.row_of(tensor, row)?;
        self.kernels.address_mut(tensor)?;
        Ok(self.value(address))
    }

    /// Adds the address of byte `at` of a block.
    ///
    /// # Errors
    /// Returns an error if the block belongs to another GPU or stream.
    pub(super) fn block(&mut self, block: &'a Block, at: usize) -> Result<&mut Self> {
        if !block.is_on(&self.kernels.gpu) {
            return Err(Error::input(format!(
                "a batch was made for another GPU than {}, or for another stream there; make it where it is used",
                self.kernels.gpu.device.ordinal()
            )));
        }
        assert!(at <= block.bytes(), "the address is within the block");
        Ok(self.value(block.address() + at as u64))
    }

    /// Adds a number, or a struct laid out as the kernel declares it.
    pub(super) fn value(&mut self, value: impl Argument + 'static) -> &mut Self {
        self.arguments.push(Box::new(value));
        self
    }

    /// Enqueues the kernel over a grid. Enqueues nothing if a dimension is zero.
    ///
    /// # Errors
    /// Returns an error if the source does not compile, or the device fails.
    ///
    /// # Safety
    /// The arguments match the declaration of the kernel: number, order, size, element types. All memory that it reads and writes
    /// with this grid is within the tensors and blocks among them, and the memory that it writes is given by
    /// [`write`](Self::write), or is written by other work only in the order of the stream.
    pub(super) unsafe fn launch(&self, grid: [u32; 2], threads: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with_shared(grid, threads, 0) }
    }

    /// Enqueues a kernel as [`launch`](Self::launch) does, with `bytes` bytes of dynamic shared memory per block.
    ///
    /// # Errors
    /// Returns the errors of [`launch`](Self::launch), or an error if the GPU has less shared memory.
    ///
    /// # Safety
    /// The requirements of [`launch`](Self::launch). The kernel uses no more shared memory.
    pub(super) unsafe fn launch_with_shared(&self, grid: [u32; 2], threads: u32, bytes: u32) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let kernel = self.kernels.get(self.source, self.name)?;
        if bytes > 0 {
            kernel.allow_shared(bytes)?;
        }
        let launch = Launch {
            grid: [grid[0], grid[1], 1],
            shared_bytes: bytes,
            // Every kernel waits before it touches what earlier ones write: `types.cu`.
            overlap: self.kernels.gpu.device.info().capability >= (9, 0),
            ..Launch::new(grid[0], threads)
        };
        let arguments: Vec<&dyn Argument> = self.arguments.iter().map(|a| &**a).collect();
        // SAFETY: the arguments match by the caller's promise. Their memory is on this device, borrowed until here, and used,
        // freed or reused only in the order of this one stream.
        unsafe { kernel.launch(self.kernels.gpu.device.stream(), launch, &arguments) }?;
        Ok(())
    }

    /// Enqueues a kernel that strides over `count` elements.
    ///
    /// # Errors
    /// Returns the errors of [`launch`](Self::launch).
    ///
    /// # Safety
    /// The requirements of [`launch`](Self::launch), for a grid of any size.
    pub(super) unsafe fn launch_over(&self, count: usize) -> Result<()> {
        let most = self.kernels.gpu.device.info().multiprocessors * BLOCKS;
        let blocks = count.div_ceil(THREADS as usize * ELEMENTS).min(most as usize) as u32;
        // SAFETY: the caller's promise holds for every grid.
        unsafe { self.launch([blocks, 1], THREADS) }
    }
}

impl Kernels {
    /// Creates a call of a kernel, without arguments.
    pub(super) fn call(&self, source: Source, name: &'static str) -> KernelCall<'_> {
        KernelCall {
            kernels: self,
            source,
            name,
            arguments: Vec::with_capacity(MOST_ARGUMENTS),
            operands: PhantomData,
        }
    }

    /// Returns the address of a row of a tensor on this GPU.
    pub(super) fn row_of(&self, tensor: &Tensor, row: usize) -> Result<u64> {
        assert!(row <= tensor.rows(), "the tensor has the row");
        Ok(self.here(tensor)?.address() + (row * tensor.columns() * tensor.dtype().size()) as u64)
    }

    /// Returns the address of a tensor that a kernel writes.
    ///
    /// # Errors
    /// Returns the errors of [`here`](Self::here).
    pub(super) fn address_mut(&self, tensor: &mut Tensor) -> Result<u64> {
        self.here(tensor)?;
        Ok(tensor.device_mut().map_or(0, DeviceArray::address_mut))
    }

    /// Returns the memory of a tensor on this GPU. It is aligned to 256 bytes.
    ///
    /// # Errors
    /// Returns an error if the tensor is in other memory or belongs to another stream.
    pub(super) fn here<'t>(&self, tensor: &'t Tensor) -> Result<&'t DeviceArray> {
        match tensor.device() {
            Some(array) if array.is_on(&self.gpu) => Ok(array),
            _ => Err(Error::input(format!(
                "a tensor of shape {:?} is not in the memory of GPU {}, which is to compute with it, or belongs to another \
                 stream there; upload it first",
                tensor.shape(),
                self.gpu.device.ordinal()
            ))),
        }
    }
}

/// Converts a count for a kernel. Kernels count rows, columns and positions with 32 bits and step beyond the last one, so the
/// maximum is half of the range of 32 bits.
///
/// # Errors
/// Returns an error if the count is larger.
pub(super) fn to_u32(what: &str, count: usize) -> Result<u32> {
    match u32::try_from(count) {
        Ok(small) if small <= 1 << 31 => Ok(small),
        _ => Err(Error::input(format!("{count} {what} are more than a GPU's kernel counts"))),
    }
}

#[cfg(test)]
mod tests {
    use super::to_u32;

    #[test]
    fn kernels_count_to_half_of_what_32_bits_hold() {
        assert_eq!(to_u32("rows", 1 << 31).unwrap(), 1 << 31);
        for count in [(1 << 31) + 1, u32::MAX as usize, usize::MAX] {
            assert!(to_u32("rows", count).unwrap_err().to_string().contains("rows are more than"), "{count}");
        }
    }
}
