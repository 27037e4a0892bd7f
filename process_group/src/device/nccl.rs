//! NVIDIA's collectives: their functions, and what their codes mean.

mod error;

pub use error::NcclError;

use std::ffi::{c_char, c_void};

use libloading::os::unix::Library;

use super::symbols::{Address, Handle, Table, Version, functions};

/// `ncclUniqueId`, passed by value.
#[repr(C)]
#[allow(missing_docs, reason = "opaque")]
#[derive(Clone, Copy, Debug)]
pub struct UniqueId(pub [u8; 128]);

functions! {
    /// NCCL.
    Nccl {
        ncclGetVersion(*mut i32) -> i32;
        ncclGetErrorString(i32) -> *const c_char;
        ncclGetLastError(Handle) -> *const c_char;
        ncclGetUniqueId(*mut UniqueId) -> i32;
        ncclCommInitRankConfig(*mut Handle, i32, UniqueId, i32, *mut c_void) -> i32;
        ncclCommSplit(Handle, i32, i32, *mut Handle, *mut c_void) -> i32;
        ncclCommGetAsyncError(Handle, *mut i32) -> i32;
        ncclCommFinalize(Handle) -> i32;
        ncclCommDestroy(Handle) -> i32;
        ncclCommAbort(Handle) -> i32;
        ncclGroupStart() -> i32;
        ncclGroupEnd() -> i32;
        ncclAllReduce(Address, Address, usize, i32, i32, Handle, Handle) -> i32;
        ncclReduce(Address, Address, usize, i32, i32, i32, Handle, Handle) -> i32;
        ncclBroadcast(Address, Address, usize, i32, i32, Handle, Handle) -> i32;
        ncclAllGather(Address, Address, usize, i32, Handle, Handle) -> i32;
        ncclReduceScatter(Address, Address, usize, i32, i32, Handle, Handle) -> i32;
        ncclSend(Address, usize, i32, i32, Handle, Handle) -> i32;
        ncclRecv(Address, usize, i32, i32, Handle, Handle) -> i32;
    }
}

impl Table for Nccl {
    const NAME: &'static str = "NCCL";
    /// The first with `ncclCommSplit`.
    const MINIMUM: Version = Version(2, 18, 0);

    fn load(library: &Library) -> Result<Self, String> {
        Self::take(library)
    }

    fn version(&self) -> Result<Version, String> {
        let mut number = 0;
        // SAFETY: the pointer is to a live integer; this function may be called before all others.
        let code = unsafe { (self.ncclGetVersion)(&raw mut number) };
        if code != 0 {
            return Err(format!("ncclGetVersion returned {code}"));
        }
        let number = number.unsigned_abs();
        // 2.8 and older counted thousands.
        Ok(if number < 10_000 {
            Version(number / 1000, number % 1000 / 100, number % 100)
        } else {
            Version(number / 10_000, number % 10_000 / 100, number % 100)
        })
    }

    fn address(&self) -> usize {
        self.first_address()
    }
}
