//! Items for all other modules: ranks, element types, operations, units, names of metrics, threads. This module does not depend on
//! groups.

pub(crate) mod aligned;
pub(crate) mod backend_kind;
pub(crate) mod blame;
pub(crate) mod deadline;
pub(crate) mod dtype;
pub(crate) mod history;
pub mod metric_names;
pub(crate) mod operation;
pub(crate) mod panic;
pub(crate) mod rank;
pub(crate) mod runtime_thread;
pub(crate) mod sync;
pub mod units;
