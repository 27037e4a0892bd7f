//! Compiled kernels and their launch.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaModule, sys};
use cudarc::nvrtc::Ptx;

use super::context::{Context, driver_call};
use super::error::DeviceError;
use super::stream::Stream;
use super::symbols::foreign;

/// A loaded CUBIN or PTX.
pub struct Module {
    context: Arc<Context>,
    loaded: Arc<CudaModule>,
    name: String,
}

impl Module {
    /// Loads the output of the compiler, unchanged: the driver gets no length, and trusts the headers of a CUBIN and the final zero
    /// of PTX.
    pub(super) fn load(context: &Arc<Context>, name: &str, code: Vec<u8>) -> Result<Self, DeviceError> {
        let loaded = context.took("cuModuleLoadData", context.cuda().load_module(Ptx::from_binary(code)))?;
        Ok(Self { context: Arc::clone(context), loaded, name: name.into() })
    }

    /// Returns a kernel of the module, declared `extern "C" __global__`.
    ///
    /// # Errors
    /// When the module has no kernel of this name.
    pub fn kernel(self: &Arc<Self>, name: &str) -> Result<Kernel, DeviceError> {
        self.context.bind()?;
        if name.contains('\0') {
            return Err(DeviceError::invalid(format!("`{name}` is no name for a kernel")));
        }
        let function = self.loaded.load_function(name).map_err(|error| {
            DeviceError::invalid(format!(
                "the compiled source `{}` has no kernel `{name}` (CUDA error {})",
                self.name, error.0 as i32
            ))
        })?;
        Ok(Kernel { context: Arc::clone(&self.context), function })
    }
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Module({})", self.name)
    }
}

/// One kernel, which keeps its module loaded.
#[derive(Clone)]
pub struct Kernel {
    context: Arc<Context>,
    function: CudaFunction,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernel({:p})", self.function.cu_function())
    }
}

/// The threads of a launch, and the memory that they share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block in bytes; more than 48 KiB needs [`Kernel::allow_shared`] once.
    pub shared_bytes: u32,
    /// Number of blocks of a cluster in x; 1 for no clusters.
    pub cluster: u32,
    /// True if it may start before the previous kernel has ended (programmatic dependent launch). The kernel must then wait
    /// (`griddepcontrol.wait`), on at least one thread, before it ends, before it writes, and before it reads what an earlier kernel may
    /// have written.
    pub overlap: bool,
}

impl Launch {
    /// Creates a launch of `blocks` blocks of `threads` threads.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0, cluster: 1, overlap: false }
    }

    /// Creates a launch of enough blocks of `threads` threads for `count` elements. CUDA rejects the launch when a grid cannot have
    /// that many blocks, or `threads` is 0.
    pub fn over(count: usize, threads: u32) -> Self {
        let blocks = count.div_ceil(threads.max(1) as usize).max(1);
        Self::new(u32::try_from(blocks).unwrap_or(u32::MAX), threads)
    }
}

/// A value that a kernel takes: a number, an address, or a plain struct with the layout that the kernel declares.
pub trait Argument {
    /// Returns the address of the value.
    fn pointer(&self) -> *mut c_void;
}

impl<T: bytemuck::Pod> Argument for T {
    fn pointer(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

/// Maximum number of arguments of a kernel.
const ARGUMENTS: usize = 32;

impl Kernel {
    /// Lets launches use up to `bytes` bytes of dynamic shared memory per block.
    ///
    /// # Errors
    /// When the GPU has less shared memory.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), DeviceError> {
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.context.bind()?;
        self.context.took("cuFuncSetAttribute", self.function.set_attribute(most, bytes as i32))
    }

    /// Returns the number of blocks of this shape that fit one multiprocessor at a time.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn blocks_per_multiprocessor(&self, threads: u32, shared_bytes: u32) -> Result<u32, DeviceError> {
        self.context.bind()?;
        let fit = self.function.occupancy_max_active_blocks_per_multiprocessor(
            threads,
            shared_bytes as usize,
            None,
        );
        self.context.took("cuOccupancyMaxActiveBlocksPerMultiprocessor", fit)
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
        let mut attributes = [sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        }; 2];
        let mut used = 0;
        if launch.cluster > 1 {
            attributes[used].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[used].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: launch.cluster, y: 1, z: 1 };
            used += 1;
        }
        if launch.overlap {
            attributes[used].id =
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[used].value.programmaticStreamSerializationAllowed = 1;
            used += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared_bytes,
            hStream: stream.handle(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: used as u32,
        };
        let (function, extra) = (self.function.cu_function(), std::ptr::null_mut());
        // SAFETY: config, attributes and arguments live through the call, which copies them; the rest is the caller's.
        unsafe {
            driver_call!(
                self.context,
                cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), extra)
            )
        }
    }
}
