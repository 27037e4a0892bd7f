//! Ranks that call collectives on buffers.
//!
//! The way in is a [`ProcessGroup`]; [`ProcessGroup::loopback`] makes one whose ranks are threads of this process.

mod aligned;
pub mod backend;
mod backend_kind;
mod buckets;
mod buffer;
mod call;
mod capability;
pub mod catalogue;
mod deadline;
pub mod device;
mod dtype;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod half_open;
mod in_process;
mod layout;
mod manager;
mod mesh;
pub mod metric_names;
pub mod nvml;
mod operation;
mod panic;
pub mod paths;
mod profile;
mod rank;
mod recorder;
mod reduce;
mod rendezvous;
mod roster;
pub mod schedule;
pub mod security;
mod self_check;
pub mod store;
mod sync;
pub mod targets;
#[cfg(test)]
mod testing;
pub mod tuning;
pub mod units;
mod wire;
mod work;

pub use backend::select::{BackendSelection, SelectionError, select_backend};
pub use backend_kind::BackendKind;
pub use buckets::{BucketLayout, BucketOptions, BucketedReducer, Parameter};
pub use buffer::{Buffer, BufferMut, DeviceMemory, Memory, View, ViewMut};
pub use call::Call;
pub use capability::{Capability, ComponentVersion, Exclusive};
pub use dtype::{DType, Element, UnknownDType};
pub use error::{Error, Result};
pub use group::{Arrival, CapturedCalls, GroupBuffer, GroupInfo, LastCall, ProcessGroup, WireType};
pub use half_open::{HalfOpen, Seat};
pub use in_process::InProcess;
pub use layout::Layout;
pub use manager::ProcessGroupManager;
pub use operation::{CallFingerprint, Operation, ReduceOp};
pub use panic::panic_message;
pub use profile::{Profile, ProfileRow, RecentLatency, Recording, bus_factor, call_bytes};
pub use rank::{Epoch, LocalRank, NoRank, Rank};
pub use recorder::{
    CallRecord, CurrentCall, Failure, FlightRecord, FlightRecorder, GroupActivity, GroupRecord, Outcome,
};
pub use rendezvous::{Membership, MemoryRendezvous, Rendezvous};
pub use roster::{Candidate, Cpus, Member, Roster, Secret};
pub use work::{Work, WorkFuture};

#[cfg(test)]
mod tests {
    use super::*;

    /// Checked by the compiler.
    #[test]
    fn engines_move_groups_and_operations_in_flight_to_threads() {
        fn moved<T: Send + 'static>() {}
        moved::<ProcessGroup>();
        moved::<ProcessGroupManager>();
        moved::<Work<Vec<f32>>>();
        moved::<CapturedCalls>();
    }
}
