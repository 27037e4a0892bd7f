//! Compiled kernels and how they are launched.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use super::context::Context;
use super::driver::{LaunchAttribute, LaunchConfig};
use super::error::DeviceError;
use super::stream::Stream;
use super::symbols::Handle;

/// A loaded CUBIN or PTX.
pub struct Module {
    context: Arc<Context>,
    handle: Handle,
    name: String,
}

impl Module {
    /// Loads what the compiler made, unchanged: the driver is told no length, and trusts a CUBIN's headers and a PTX's final
    /// zero.
    pub(super) fn load(context: &Arc<Context>, name: &str, code: &[u8]) -> Result<Self, DeviceError> {
        context.bind()?;
        let mut handle = 0;
        // SAFETY: the image is a whole CUBIN, whose headers tell where it ends, or text that ends with a zero.
        let status = unsafe { (context.driver.cuModuleLoadData)(&raw mut handle, code.as_ptr().cast()) };
        context.check("cuModuleLoadData", status)?;
        Ok(Self { context: Arc::clone(context), handle, name: name.into() })
    }

    /// A kernel of it, declared `extern "C" __global__`.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn kernel(self: &Arc<Self>, name: &str) -> Result<Kernel, DeviceError> {
        self.context.bind()?;
        let wanted = CString::new(name)
            .map_err(|_| DeviceError::invalid(format!("`{name}` is no name for a kernel")))?;
        let mut handle = 0;
        // SAFETY: the module is loaded, the name ends with a zero, the pointer is to a live handle.
        let code = unsafe {
            (self.context.driver.cuModuleGetFunction)(&raw mut handle, self.handle, wanted.as_ptr())
        };
        if code != 0 {
            return Err(DeviceError::invalid(format!(
                "the compiled source `{}` has no kernel `{name}` (CUDA error {code})",
                self.name
            )));
        }
        Ok(Kernel { module: Arc::clone(self), handle })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: loaded once, unloaded once; kernels hold the module.
            let _ = unsafe { (self.context.driver.cuModuleUnload)(self.handle) };
        }
    }
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Module({})", self.name)
    }
}

/// One kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    module: Arc<Module>,
    handle: Handle,
}

/// How many threads a launch has, and what they share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block in bytes; more than 48 KiB needs [`Kernel::allow_shared`] once.
    pub shared_bytes: u32,
    /// Blocks of a cluster in x; 1 for none.
    pub cluster: u32,
    /// Whether it may start before the kernel in front of it has ended (programmatic dependent launch). The kernel must
    /// then wait (`griddepcontrol.wait`) before it touches what that one writes.
    pub overlap: bool,
}

impl Launch {
    /// `blocks` blocks of `threads` threads.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0, cluster: 1, overlap: false }
    }

    /// Enough blocks of `threads` threads for `count` elements.
    pub fn over(count: usize, threads: u32) -> Self {
        Self::new(count.div_ceil(threads as usize).max(1) as u32, threads)
    }
}

/// A value that a kernel takes: a number, an address, or a plain struct laid out as the kernel declares it.
pub trait Argument {
    /// Where the value is.
    fn pointer(&self) -> *mut c_void;
}

impl<T: bytemuck::Pod> Argument for T {
    fn pointer(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

/// Most arguments of a kernel.
const ARGUMENTS: usize = 32;

impl Kernel {
    /// Lets launches use up to `bytes` bytes of dynamic shared memory a block.
    ///
    /// # Errors
    /// When the GPU has less.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), DeviceError> {
        let context = &self.module.context;
        context.bind()?;
        // SAFETY: the kernel's module is loaded; attribute 8 is the limit of dynamic shared memory.
        let code = unsafe { (context.driver.cuFuncSetAttribute)(self.handle, 8, bytes as i32) };
        context.check("cuFuncSetAttribute", code)
    }

    /// How many blocks of this shape fit one multiprocessor at a time.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn blocks_per_multiprocessor(&self, threads: u32, shared_bytes: u32) -> Result<u32, DeviceError> {
        let context = &self.module.context;
        context.bind()?;
        let mut blocks = 0;
        // SAFETY: the kernel's module is loaded, the pointer is to a live integer.
        let code = unsafe {
            (context.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                &raw mut blocks,
                self.handle,
                threads as i32,
                shared_bytes as usize,
            )
        };
        context.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(blocks.unsigned_abs())
    }

    /// Enqueues the kernel.
    ///
    /// # Safety
    /// `arguments` must be what the kernel declares: number, order, size and alignment of each. Every address among them
    /// must be memory that the GPU reaches, long enough for what the kernel does with it, not written by anything else
    /// meanwhile, and allocated until the kernel has ended. None of this can be checked here.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        launch: Launch,
        arguments: &[&dyn Argument],
    ) -> Result<(), DeviceError> {
        if arguments.len() > ARGUMENTS {
            return Err(DeviceError::invalid(format!(
                "a kernel takes at most {ARGUMENTS} arguments here, not {}; put them into a struct",
                arguments.len()
            )));
        }
        let mut pointers = [std::ptr::null_mut(); ARGUMENTS];
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = argument.pointer();
        }
        let mut attributes = [LaunchAttribute { id: 0, pad: 0, value: [0; 8] }; 2];
        let mut used = 0;
        if launch.cluster > 1 {
            // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: x, y, z.
            attributes[used].id = 4;
            attributes[used].value[..2].copy_from_slice(&[u64::from(launch.cluster) | 1 << 32, 1]);
            used += 1;
        }
        if launch.overlap {
            // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
            attributes[used].id = 6;
            attributes[used].value[0] = 1;
            used += 1;
        }
        let config = LaunchConfig {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            stream: stream.handle(),
            attributes: attributes.as_ptr(),
            attribute_count: used as u32,
        };
        let context = &self.module.context;
        context.bind()?;
        // SAFETY: config, attributes and arguments live through the call, which copies them; the rest is the caller's.
        let code = unsafe {
            (context.driver.cuLaunchKernelEx)(
                &raw const config,
                self.handle,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        context.check("cuLaunchKernelEx", code)
    }
}
