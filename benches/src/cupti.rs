//! The times of kernels on a GPU, from CUPTI's activity records.

#![expect(unsafe_code, reason = "the functions of CUPTI are foreign; each block says why it holds")]

use std::alloc::Layout;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Result, bail, ensure};
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
    /// True if it is a node of a graph.
    pub is_node: bool,
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
#[repr(C)]
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
    reserved: *const c_void,
    queued: u64,
    submitted: u64,
    launch: [u8; 4],
    shared_executed: u32,
    graph_node: u64,
}

/// Kernels delivered by the library since [`KernelTimes::take`].
static RECORDED: Mutex<Vec<Kernel>> = Mutex::new(Vec::new());
/// `cuptiActivityGetNextRecord`, for the callback, which gets no context of ours.
static NEXT_RECORD: OnceLock<NextRecord> = OnceLock::new();

type NextRecord = unsafe extern "C" fn(*mut u8, usize, *mut *mut c_void) -> u32;
type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);
type Number = unsafe extern "C" fn(u32) -> u32;

/// Records the kernels of this process until it is dropped. A process has one at a time.
#[derive(Debug)]
pub struct KernelTimes {
    /// Never unloaded: it has a thread of its own.
    library: &'static Library,
}

impl KernelTimes {
    /// Begins to record. Call this before a graph is captured, so that its nodes are recorded.
    ///
    /// # Errors
    /// Returns an error if CUPTI does not load, or does not allow it.
    pub fn record() -> Result<Self> {
        let library: &Library = Box::leak(Box::new(load()?));
        // SAFETY: the types are those of CUPTI's header. The callbacks stay valid: they are functions of this program.
        unsafe {
            NEXT_RECORD.get_or_init(|| next_record_of(library));
            let register = library.get::<unsafe extern "C" fn(Requested, Completed) -> u32>(
                b"cuptiActivityRegisterCallbacks",
            )?;
            check("cuptiActivityRegisterCallbacks", register(requested, completed))?;
        }
        let recorder = Self { library };
        recorder.call("cuptiActivityEnable", CONCURRENT_KERNEL)?;
        Ok(recorder)
    }

    /// Returns the kernels that have ended since the last call, in the order in which they ended. Synchronise with the GPU before,
    /// so that none is missing.
    ///
    /// # Errors
    /// Returns an error if CUPTI does.
    pub fn take(&self) -> Result<Vec<Kernel>> {
        self.call("cuptiActivityFlushAll", FLUSH_FORCED)?;
        let mut kernels = std::mem::take(&mut *RECORDED.lock().unwrap_or_else(PoisonError::into_inner));
        kernels.sort_by_key(|kernel| kernel.end);
        Ok(kernels)
    }

    fn call(&self, name: &str, number: u32) -> Result<()> {
        // SAFETY: the type is that of the functions in CUPTI's header that are called here.
        check(name, unsafe { self.library.get::<Number>(name)?(number) })
    }
}

impl Drop for KernelTimes {
    fn drop(&mut self) {
        let _ = self.call("cuptiActivityDisable", CONCURRENT_KERNEL);
    }
}

fn load() -> Result<Library> {
    let mut errors = Vec::new();
    for name in NAMES {
        // SAFETY: the library is NVIDIA's; its initialisers have no conditions.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => errors.push(error.to_string()),
        }
    }
    bail!(
        "CUPTI does not load ({}); it comes with the CUDA toolkit, in extras/CUPTI/lib64: add that folder to LD_LIBRARY_PATH",
        errors.join("; ")
    )
}

/// Returns the function, or one that finds no record if the library has none.
///
/// # Safety
/// The library is CUPTI.
unsafe fn next_record_of(library: &'static Library) -> NextRecord {
    unsafe extern "C" fn none(_: *mut u8, _: usize, _: *mut *mut c_void) -> u32 {
        1
    }
    // SAFETY: the type is that of CUPTI's header.
    unsafe { library.get::<NextRecord>(b"cuptiActivityGetNextRecord").map_or(none, |next| *next) }
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
    let mut kernels = Vec::new();
    let mut record = std::ptr::null_mut();
    // SAFETY: the library goes from record to record until there is none. A record of this kind begins as declared, and its name
    // is alive. The buffer is not used after.
    unsafe {
        while NEXT_RECORD.get().is_some_and(|next| next(buffer, valid, &raw mut record) == 0) {
            if record.cast::<u32>().read_unaligned() != CONCURRENT_KERNEL {
                continue;
            }
            let KernelRecord { name, start, end, graph_node, .. } =
                record.cast::<KernelRecord>().read_unaligned();
            // Both are 0 where the library knows no times.
            if end > 0 {
                let name = CStr::from_ptr(name).to_string_lossy().into_owned();
                kernels.push(Kernel { name, start, end, is_node: graph_node != 0 });
            }
        }
        std::alloc::dealloc(buffer, BUFFER);
    }
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner).append(&mut kernels);
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::KernelRecord;

    #[test]
    fn a_record_is_laid_out_as_in_the_header() {
        let offsets = [
            offset_of!(KernelRecord, start),
            offset_of!(KernelRecord, name),
            offset_of!(KernelRecord, graph_node),
        ];
        assert_eq!(offsets, [16, 104, 144]);
    }
}
