//! Collectives among the ranks of a job, on GPUs or CPUs.
//!
//! Start at [`ProcessGroupManager::initialize`]. It joins a job through a [`Rendezvous`], which selects one backend for all ranks. The
//! manager makes the groups:
//!
//! ```
//! use ryzanstein_config::Config;
//! use ryzanstein_process_group::{MemoryRendezvous, ProcessGroupManager, ReduceOp};
//!
//! # fn main() -> ryzanstein_process_group::Result<()> {
//! // One rank alone. A rank that is a process of its own gets its rendezvous from `ryzanstein_orchestrator::rendezvous::connect`.
//! let rendezvous = MemoryRendezvous::new(1).remove(0);
//! let mut manager = ProcessGroupManager::initialize(&Config::default(), &rendezvous)?;
//! let mut x = [1.0f32, 2.0];
//! manager.world().all_reduce(&mut x, ReduceOp::Sum)?;
//! manager.finalize()?;
//! # Ok(())
//! # }
//! ```
//!
//! **On a GPU, `Ok` means enqueued**: a call on device memory runs in stream order, and [`ProcessGroup::synchronize`] waits. A
//! failed transport, a timeout or a mismatch poisons the group: later calls return [`Error::Poisoned`], because the state of the other
//! ranks is unknown. A job that the launcher restarts makes new groups.
//!
//! Ranks that are threads of one process need no manager:
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
//! | call collectives, send and receive | [`ProcessGroup`], with a [`Buffer`] and a [`ReduceOp`]; [`Work`] is a call in flight |
//! | make groups of some ranks | [`ProcessGroupManager::new_group`] |
//! | reduce gradients in buckets | [`BucketedReducer`] |
//! | say how ranks meet, who they are, and which groups they form | [`Rendezvous`], [`Roster`], [`Layout`] |
//! | inspect calls and errors | [`Error`], [`Profile`], [`FlightRecorder`] |
//! | work on GPUs, with a stream of your own | [`mod@device`] |
//! | learn why a call takes its path, or force another | [`paths`] |

mod backend;
mod cpu;
pub mod device;
mod error;
mod factory;
mod gpu;
mod group;
mod link;
mod manager;
mod membership;
mod observe;
pub mod paths;
mod stream;
#[cfg(test)]
mod testing;
mod types;

pub use device::buffer::{Buffer, BufferMut, DeviceMemory, Memory, View, ViewMut};
pub use error::{Error, Result};
pub use group::buckets::{BucketLayout, BucketOptions, BucketedReducer, Parameter};
pub use group::work::Work;
pub use group::{Arrival, CapturedCalls, GroupBuffer, GroupInfo, ProcessGroup, WireType};
pub use manager::ProcessGroupManager;
pub use membership::capability::{Capability, ComponentVersion, Exclusive};
pub use membership::layout::Layout;
pub use membership::rendezvous::{Membership, MemoryRendezvous, Rendezvous};
pub use membership::roster::{Candidate, Cpus, Member, Roster, Secret};
pub use membership::select::{BackendSelection, select_backend};
pub use membership::store;
pub use observe::flight_recorder::FlightRecorder;
pub use observe::profile::{LastCall, Profile, ProfileRow, bus_factor, call_bytes};
pub use observe::record::{CallRecord, Failure, FlightRecord, GroupRecord, Outcome};
pub use types::backend_kind::BackendKind;
pub use types::dtype::{DType, Element, UnknownDType};
pub use types::operation::{CallFingerprint, Operation, ReduceOp};
pub use types::rank::{Epoch, LocalRank, Rank};

// For the other crates of this repository; not part of the API, may change at any time.
#[doc(hidden)]
pub mod catalogue;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[doc(hidden)]
pub mod schedule;
#[doc(hidden)]
pub use device::nvml;
#[doc(hidden)]
pub use link::security;
#[doc(hidden)]
pub use manager::tuning;
#[doc(hidden)]
pub use membership::half_open::{AdmissionToken, HalfOpen};
#[doc(hidden)]
pub use observe::activity::{CurrentCall, GroupActivity, RecentLatency};
#[doc(hidden)]
pub use observe::profile::Recording;
#[doc(hidden)]
pub use observe::targets;
#[doc(hidden)]
pub use types::panic::panic_message;
#[doc(hidden)]
pub use types::runtime_thread::RuntimeThread;
#[doc(hidden)]
pub use types::{metric_names, units};

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
