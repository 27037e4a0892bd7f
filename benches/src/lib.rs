//! The latency-target benchmark suite, which `ryz bench` runs, and the shared parts of the programs that are compared with
//! peers.
//!
//! [`measure`] times one collective and compares every value; [`suite`] runs many, compares them with the documented targets and
//! reports.

pub mod cgroup;
pub mod communication;
pub mod cupti;
pub mod measure;
pub mod nodes;
pub mod ranks;
pub mod suite;
