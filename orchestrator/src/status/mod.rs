//! The state of a running job: what its ranks report, and how a launcher serves it to `ryz status` and other clients.
//!
//! Only the launcher's user can reach the [folder](folder()) of its Unix socket. Each client that connects gets one message, `Job` of
//! `proto/status.proto`, after its length.

mod client;
mod endpoint;
mod folder;
mod sentence;
mod view;
pub mod wire;

pub use client::{Client, StatusError, find};
pub(crate) use endpoint::{Endpoint, Question};
pub use folder::{FolderError, folder};
pub(crate) use sentence::{no_progress, process_state};
pub use view::{json, list, table};
