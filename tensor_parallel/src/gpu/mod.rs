//! GPU memory, and transfers to and from it.

mod download;
mod memory;
mod staging;

pub(crate) use self::download::Download;
pub(crate) use self::memory::{Block, CapturedMemory, DeviceArray, Gpu, class, lock};
