//! The times of kernels on a GPU, from CUPTI's activity records.

#![expect(unsafe_code, reason = "the functions of CUPTI are foreign; each block says why it holds")]

use std::alloc::Layout;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use libloading::Library;

/// A kernel that ran on this process's GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kernel {
    /// The name, mangled if it is that of a C++ function.
    pub name: String,
    /// When its first block began, in nanoseconds.
    pub start: u64,
    /// When its last block had ended, in nanoseconds.
    pub end: u64,
}

/// Names under which the library is found, the newest first.
const NAMES: [&str; 3] = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];
/// `CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL`.
const CONCURRENT_KERNEL: u32 = 10;
/// `CUPTI_ACTIVITY_FLAG_FLUSH_FORCED`: records that are not complete too.
const FLUSH_FORCED: u32 = 1;
const BUFFER: Layout = match Layout::from_size_align(8 << 20, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("a buffer's size is a valid layout"),
};

/// The beginning of `CUpti_ActivityKernel9`; later versions begin with the same fields.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
struct KernelRecord {
    kind: u32,
    cache: [u8; 2],
    registers: u16,
    partitioned: [u32; 2],
    start: u64,
    end: u64,
    completed: u64,
    device: u32,
    context: u32,
    stream: u32,
    grid: [i32; 3],
    block: [i32; 3],
    shared: [i32; 2],
    local: [u32; 2],
    correlation: u32,
    grid_id: i64,
    name: *const c_char,
}

/// What the library has delivered since [`KernelTimes::take`].
static RECORDED: Mutex<Vec<Kernel>> = Mutex::new(Vec::new());
/// `cuptiActivityGetNextRecord`, for the callback, which is given no context of ours.
static NEXT_RECORD: Mutex<Option<NextRecord>> = Mutex::new(None);

type NextRecord = unsafe extern "C" fn(*mut u8, usize, *mut *mut c_void) -> u32;
type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// Records the kernels of this process until the process ends.
#[derive(Debug)]
pub struct KernelTimes {
    /// Never unloaded: it has a thread of its own.
    library: &'static Library,
}

impl KernelTimes {
    /// Begins to record. Graphs must be captured later to be recorded node by node.
    ///
    /// # Errors
    /// Returns an error if CUPTI is not found, or does not allow it.
    pub fn record() -> Result<Self> {
        // SAFETY: the library is NVIDIA's; its initialisers have no conditions.
        let mut found = NAMES.iter().map(|name| unsafe { Library::new(*name) });
        let library = found.find_map(Result::ok).with_context(|| {
            format!(
                "none of {} is found; CUPTI comes with the CUDA toolkit, in extras/CUPTI/lib64: add that folder to \
                 LD_LIBRARY_PATH",
                NAMES.join(", ")
            )
        })?;
        let library: &Library = Box::leak(Box::new(library));
        // SAFETY: the types are those of CUPTI's header. The callbacks stay valid: they are functions of this program.
        unsafe {
            let next = library.get::<NextRecord>(b"cuptiActivityGetNextRecord")?;
            *NEXT_RECORD.lock().unwrap_or_else(PoisonError::into_inner) = Some(*next);
            let register = library.get::<unsafe extern "C" fn(Requested, Completed) -> u32>(
                b"cuptiActivityRegisterCallbacks",
            )?;
            check("cuptiActivityRegisterCallbacks", register(requested, completed))?;
            let enable = library.get::<unsafe extern "C" fn(u32) -> u32>(b"cuptiActivityEnable")?;
            check("cuptiActivityEnable", enable(CONCURRENT_KERNEL))?;
        }
        Ok(Self { library })
    }

    /// Returns the kernels that have ended since the last call, in the order in which they ended.
    ///
    /// # Errors
    /// Returns an error if CUPTI does.
    pub fn take(&self) -> Result<Vec<Kernel>> {
        // SAFETY: the type is that of CUPTI's header.
        unsafe {
            let flush = self.library.get::<unsafe extern "C" fn(u32) -> u32>(b"cuptiActivityFlushAll")?;
            check("cuptiActivityFlushAll", flush(FLUSH_FORCED))?;
        }
        let mut kernels = std::mem::take(&mut *RECORDED.lock().unwrap_or_else(PoisonError::into_inner));
        kernels.sort_by_key(|kernel| kernel.end);
        Ok(kernels)
    }
}

fn check(call: &str, code: u32) -> Result<()> {
    ensure!(code == 0, "{call} failed with CUPTI status {code}");
    Ok(())
}

/// Gives the library a buffer.
///
/// # Safety
/// The pointers are valid.
unsafe extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, most: *mut usize) {
    // SAFETY: the layout is not empty; the pointers are the caller's promise. A null buffer tells the library that there is none.
    unsafe {
        *buffer = std::alloc::alloc(BUFFER);
        *size = BUFFER.size();
        *most = 0;
    }
}

/// Reads the records of a buffer, and frees it.
///
/// # Safety
/// The buffer is one of [`requested`], with `valid` bytes of records.
unsafe extern "C" fn completed(_: *mut c_void, _: u32, buffer: *mut u8, _: usize, valid: usize) {
    let next = *NEXT_RECORD.lock().unwrap_or_else(PoisonError::into_inner);
    let mut kernels = Vec::new();
    let mut record = std::ptr::null_mut();
    // SAFETY: the library goes from record to record until there is none. A record of this kind begins as declared, and its name
    // is alive. The buffer is not used after.
    unsafe {
        while next.is_some_and(|next| next(buffer, valid, &raw mut record) == 0) {
            if record.cast::<u32>().read() != CONCURRENT_KERNEL {
                continue;
            }
            let KernelRecord { name, start, end, .. } = record.cast::<KernelRecord>().read();
            kernels.push(Kernel { name: CStr::from_ptr(name).to_string_lossy().into_owned(), start, end });
        }
        std::alloc::dealloc(buffer, BUFFER);
    }
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner).append(&mut kernels);
}
