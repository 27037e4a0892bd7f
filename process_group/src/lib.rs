//! Ranks that call collectives on buffers.
//!
//! The way in is a [`ProcessGroup`]; [`ProcessGroup::loopback`] makes one whose ranks are threads of this process.

mod aligned;
pub mod backend;
mod buffer;
mod call;
mod deadline;
pub mod device;
mod dtype;
mod error;
mod gpu;
mod group;
mod layout;
mod manager;
pub mod nvml;
mod operation;
mod profile;
mod rank;
mod reduce;
mod rendezvous;
mod roster;
pub mod schedule;
mod self_check;
pub mod store;
pub mod table;
pub mod targets;
#[cfg(test)]
mod testing;
mod wire;
mod work;

pub use buffer::{Buffer, BufferMut, DeviceMemory, Memory, View, ViewMut};
pub use call::Call;
pub use dtype::{DType, Element, UnknownDType};
pub use error::{Error, Result};
pub use group::{Arrival, GroupBuffer, GroupInfo, LastCall, ProcessGroup, Recorded};
pub use layout::Layout;
pub use manager::{Groups, ProcessGroupManager};
pub use operation::{Operation, ReduceOp, Signature};
pub use profile::{Profile, ProfileRow, Recording, bus_factor, call_bytes};
pub use rank::{Epoch, LocalRank, Rank};
pub use rendezvous::{Membership, MemoryRendezvous, Rendezvous};
pub use roster::{Agreement, BackendKind, Candidate, Capability, Gpu, Member, Roster, Secret, agree};
pub use work::Work;
