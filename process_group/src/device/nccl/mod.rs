//! NVIDIA's collectives: their functions, and the meaning of their codes.

mod error;

pub use cudarc::nccl::sys;
pub use error::NcclError;

use super::symbols::foreign;
use super::symbols::{Table, Unusable, Version, functions};

functions! {
    /// NCCL.
    Nccl {
        ncclGetVersion,
        ncclGetErrorString,
        ncclGetLastError,
        ncclGetUniqueId,
        ncclCommInitRankConfig,
        ncclCommSplit,
        ncclCommGetAsyncError,
        ncclCommFinalize,
        ncclCommDestroy,
        ncclCommAbort,
        ncclGroupStart,
        ncclGroupEnd,
        ncclAllReduce,
        ncclReduce,
        ncclBroadcast,
        ncclAllGather,
        ncclReduceScatter,
        ncclSend,
        ncclRecv,
    }
}

impl Table for Nccl {
    const NAME: &'static str = "NCCL";
    /// The first version with `ncclCommSplit`.
    const MINIMUM: Version = Version(2, 18, 0);

    fn version(&self) -> Result<Version, Unusable> {
        let mut number = 0;
        // SAFETY: the pointer is to a live integer; this function may be called before all others.
        let code = unsafe { foreign!(nccl, self.ncclGetVersion(&raw mut number)) };
        if code != 0 {
            return Err(Unusable::NoVersion { call: "ncclGetVersion", code });
        }
        let number = number.unsigned_abs();
        // Versions up to 2.8 used a factor of 1000.
        Ok(if number < 10_000 {
            Version(number / 1000, number % 1000 / 100, number % 100)
        } else {
            Version(number / 10_000, number % 10_000 / 100, number % 100)
        })
    }
}

/// Returns the id of a communicator as bytes, to send to the other ranks.
pub fn id_bytes(id: &sys::ncclUniqueId) -> [u8; 128] {
    id.internal.map(i8::cast_unsigned)
}

/// Returns the id of the bytes that another rank has sent.
pub fn id_from_bytes(bytes: [u8; 128]) -> sys::ncclUniqueId {
    sys::ncclUniqueId { internal: bytes.map(u8::cast_signed) }
}
