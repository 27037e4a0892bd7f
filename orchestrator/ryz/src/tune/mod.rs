//! `ryz tune`: measures where the built-in choices only predict. Measured paths become a table that jobs read; settings of NCCL become
//! proposals.

mod crossover;
mod measure;
mod nccl;
mod report;

pub use crossover::{Timed, Turn, choose, ranges};
pub use measure::{Request, Sizes, Tuned, run};
pub use nccl::{Proposal, Situation, changes, own_kernels_carry, propose};
pub use report::{json, table};
