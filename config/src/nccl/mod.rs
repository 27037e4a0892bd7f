//! From the section `[nccl]` and the user's own variables to what NCCL will be told, and by whom.
//!
//! NCCL reads its variables when it is loaded. A launcher hands what [`plan`] says to the processes it starts. A program
//! that embeds the engine must have the variables before its first thread starts; [`missing`] says which it lacks.
//!
//! Pure: the caller brings the variables and the contents of NCCL's own files.
//!
//! `NCCL_NVLS_ENABLE` is never set here, nor any variable that could undo it.

mod advice;
mod known;
mod plan;
mod subsystems;

pub use advice::{Advice, advice};
pub use plan::{NcclSource, NcclVariable, UserVariable, conf_file, missing, plan};
pub use subsystems::NcclSubsystems;
