//! The state of a running job: what its ranks report, and how a launcher serves it to `ryz status` and other clients.
//!
//! A launcher serves it on a Unix socket in a [folder](folder()) that only its user can reach, by gRPC: the service `Status`
//! of `proto/status.proto`, the standard health service, and reflection.

#[cfg(feature = "cli")]
mod client;
#[cfg(feature = "server")]
mod endpoint;
#[cfg(feature = "server")]
mod folder;
#[cfg(feature = "server")]
mod sentence;
#[cfg(feature = "cli")]
mod view;
pub mod wire;

#[cfg(feature = "cli")]
pub use client::{Client, StatusError, find};
#[cfg(feature = "server")]
pub(crate) use endpoint::Endpoint;
#[cfg(feature = "server")]
pub use folder::{FolderError, folder};
#[cfg(feature = "server")]
pub(crate) use sentence::{no_progress, process_state};
#[cfg(feature = "cli")]
pub use view::{json, list, table};
