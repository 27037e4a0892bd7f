//! How kernels are launched.

#![expect(unsafe_code, reason = "a launch hands addresses to a kernel; each block says why it holds")]

use ryzanstein_process_group::device::{Argument, Launch};

use super::kernels::{Kernels, Source};
use crate::error::Result;

/// Threads of a block of kernels that stride over elements.
const THREADS: u32 = 256;
/// Such kernels take at least this many elements a thread, where there are many.
const ELEMENTS: usize = 4;
/// Blocks a multiprocessor beyond which they stride.
const BLOCKS: u32 = 16;
/// Rows that the second dimension of a grid can have.
pub(super) const MOST_ROWS: u32 = 65_535;
/// As in `vector.cu`.
pub(super) const VECTOR_THREADS: u32 = 128;
pub(super) const VECTOR_ROWS: usize = 2;

/// What a kernel takes, in its own order.
#[derive(Default)]
pub(super) struct Arguments(Vec<Box<dyn Argument>>);

impl Arguments {
    pub(super) fn push(&mut self, argument: impl Argument + 'static) -> &mut Self {
        self.0.push(Box::new(argument));
        self
    }
}

impl Kernels {
    /// Enqueues a kernel of this module's sources over a grid. Nothing is enqueued where a dimension is zero.
    pub(super) fn blocks(
        &self,
        source: Source,
        name: &'static str,
        grid: [u32; 2],
        threads: u32,
        arguments: &Arguments,
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let kernel = self.get(source, name)?;
        let launch = Launch { grid: [grid[0], grid[1], 1], ..Launch::new(grid[0], threads) };
        let arguments: Vec<&dyn Argument> = arguments.0.iter().map(|a| &**a).collect();
        // SAFETY: this is reached from the operations of this module only, each of which passes what its kernel
        // declares: addresses of tensors on this device whose shapes it has checked, and those shapes. All of them are
        // used in the order of this one stream, and freed or used again behind it.
        unsafe { kernel.launch(self.gpu.device.stream(), launch, &arguments) }?;
        Ok(())
    }

    /// Enqueues a kernel that strides over `count` elements.
    pub(super) fn over(
        &self,
        source: Source,
        name: &'static str,
        count: usize,
        arguments: &Arguments,
    ) -> Result<()> {
        let most = self.gpu.device.info().multiprocessors * BLOCKS;
        let blocks = count.div_ceil(THREADS as usize * ELEMENTS).min(most as usize) as u32;
        self.blocks(source, name, [blocks, 1], THREADS, arguments)
    }
}
