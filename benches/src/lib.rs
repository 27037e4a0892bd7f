//! Times collectives and checks their values: `ryz bench` as a library, and what the programs in `src/bin` share.
//!
//! Start at [`measure::measure_group`] for one collective. For many, call [`suite::prepare`], then [`suite::run`], which compares
//! them with the documented latency targets if the request is [`judged`](suite::Request::judged). [`communication`] computes the
//! share of a step that collectives take, and advises where it is large; [`nodes`] lists the kernels of a decode pass.
//!
//! ```
//! use ryzanstein_benches::suite::{Request, prepare, run};
//! use ryzanstein_orchestrator::Orchestrator;
//! use ryzanstein_process_group::{DType, ReduceOp};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Every rank of the job does the same.
//! let mut orchestrator = Orchestrator::builder().initialize()?;
//! let request = Request {
//!     ops: vec!["all_reduce".parse()?],
//!     sizes: vec![1 << 10, 1 << 20],
//!     dtype: DType::F32,
//!     reduction: ReduceOp::Sum,
//!     warmup: None,
//!     iterations: Some(10),
//!     graph: false,
//!     paths: vec!["auto".into()],
//!     judged: false,
//!     part: None,
//! };
//! let link_gbs = prepare(&mut orchestrator, &request)?;
//! let rows = run(&mut orchestrator, &request, link_gbs, |_| Ok::<_, ryzanstein_process_group::Error>(()))?;
//! assert!(rows.iter().all(|row| row.errors == 0));
//! orchestrator.finalize()?;
//! # Ok(())
//! # }
//! ```

pub mod cgroup;
pub mod communication;
pub mod cupti;
pub mod measure;
pub mod nodes;
pub mod ranks;
pub mod suite;
