//! The `ryz` command. A library only for its own tests; programs embed `ryzanstein-orchestrator`.

// It panics if standard error cannot be written.
#![deny(clippy::print_stderr)]

pub mod check;
pub mod command;
pub mod doctor;
pub mod generate;
pub mod interconnect;
pub mod output_file;
pub mod plan;
pub(crate) mod render;
pub mod topo;
pub mod trace;
pub mod tune;
