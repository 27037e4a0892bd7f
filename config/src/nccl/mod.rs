//! Combines the section `[nccl]` with the user's own variables into the variables that NCCL reads, with the source of each value.
//!
//! NCCL reads its variables when it is loaded. A launcher sets those that [`plan()`] returns in the processes that it starts. An
//! application must have the variables before its first thread starts; [`missing`] returns those that it lacks.
//!
//! Pure: the caller passes the variables and the contents of NCCL's files.
//!
//! No profile sets `NCCL_NVLS_ENABLE`, or any variable that could undo it.

mod advice;
mod env;
mod known;
mod plan;

pub use advice::{Advice, advice};
pub use env::NcclEnv;
pub use plan::{NcclSource, NcclVariable, UserVariable, conf_file, missing, plan};
