//! Collectives among the ranks of a job, on GPUs or CPUs.
//!
//! Start at [`ProcessGroupManager`], which joins a job and hands out its groups. Ranks that are threads of one process need no job:
//!
//! ```
//! use ryzanstein_process_group::{ProcessGroup, ReduceOp};
//!
//! std::thread::scope(|scope| {
//!     for mut group in ProcessGroup::loopback(2) {
//!         scope.spawn(move || {
//!             let mut x = [1.0f32, 2.0];
//!             group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
//!             assert_eq!(x, [2.0, 4.0]);
//!         });
//!     }
//! });
//! ```
//!
//! | to | use |
//! |---|---|
//! | call collectives | [`ProcessGroup`], with a [`Buffer`] and a [`ReduceOp`]; [`Work`] is a call in flight |
//! | reduce gradients in buckets | [`BucketedReducer`] |
//! | say who is in the job | [`Rendezvous`], [`Roster`], [`Layout`] |
//! | see what happened | [`Error`], [`Profile`], [`FlightRecorder`] |
//! | work on GPUs, with a stream of your own | [`mod@device`] |
//! | learn why a call takes its path, or force another | [`paths`] |

mod aligned;
mod backend;
mod backend_kind;
mod buckets;
mod buffer;
mod call;
mod capability;
mod deadline;
pub mod device;
mod dtype;
mod error;
mod group;
mod half_open;
mod in_process;
mod layout;
mod manager;
mod mesh;
mod operation;
mod panic;
pub mod paths;
mod profile;
mod rank;
mod recorder;
mod reduce;
mod rendezvous;
mod roster;
mod self_check;
pub mod store;
mod sync;
#[cfg(test)]
mod testing;
mod wire;
mod work;

pub use backend::select::{BackendSelection, SelectionError, select_backend};
pub use backend_kind::BackendKind;
pub use buckets::{BucketLayout, BucketOptions, BucketedReducer, Parameter};
pub use buffer::{Buffer, BufferMut, DeviceMemory, Memory, View, ViewMut};
pub use capability::{Capability, ComponentVersion, Exclusive};
pub use dtype::{DType, Element, UnknownDType};
pub use error::{Error, Result};
pub use group::{Arrival, CapturedCalls, GroupBuffer, GroupInfo, LastCall, ProcessGroup, WireType};
pub use layout::Layout;
pub use manager::ProcessGroupManager;
pub use operation::{CallFingerprint, Operation, ReduceOp};
pub use profile::{Profile, ProfileRow, bus_factor, call_bytes};
pub use rank::{Epoch, LocalRank, NoRank, Rank};
pub use recorder::{CallRecord, Failure, FlightRecord, FlightRecorder, GroupRecord, Outcome};
pub use rendezvous::{Membership, MemoryRendezvous, Rendezvous};
pub use roster::{Candidate, Cpus, Member, Roster, Secret};
pub use work::{Work, WorkFuture};

// For the other crates of this repository; no API, may change at any time.
#[doc(hidden)]
pub mod catalogue;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[doc(hidden)]
pub use half_open::{HalfOpen, Seat};
#[doc(hidden)]
pub use in_process::InProcess;
#[doc(hidden)]
pub mod metric_names;
#[doc(hidden)]
pub mod nvml;
#[doc(hidden)]
pub use panic::panic_message;
#[doc(hidden)]
pub use profile::{RecentLatency, Recording};
#[doc(hidden)]
pub use recorder::{CurrentCall, GroupActivity};
#[doc(hidden)]
pub mod schedule;
#[doc(hidden)]
pub mod security;
#[doc(hidden)]
pub mod targets;
#[doc(hidden)]
pub mod tuning;
#[doc(hidden)]
pub mod units;

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
