//! Times collectives and checks their values: `ryz bench` as a library, and what the programs in `src/bin` share.
//!
//! Start at [`measure::measure_group`] for one collective, or at [`suite::prepare`] and then [`suite::run`] for many, which are
//! compared with the documented latency targets. [`communication`] gives advice on the share of a step that collectives take;
//! [`nodes`] lists the kernels of a decode pass.

pub mod cgroup;
pub mod communication;
pub mod cupti;
pub mod measure;
pub mod nodes;
pub mod ranks;
pub mod suite;
