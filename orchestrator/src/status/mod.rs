//! The state of a running job: what its ranks report, and how a launcher serves it to `ryz status` and other clients.
//!
//! Only the launcher's user, and root, can connect to its Unix socket. Each client that connects gets a [`wire::Job`] in JSON.

mod client;
mod endpoint;
mod sentence;
mod sockets;
mod view;
pub mod wire;

pub use client::{Client, StatusError, find};
pub(crate) use endpoint::{Endpoint, Question};
pub(crate) use sentence::{no_progress, process_state};
pub use sockets::{SocketError, folder};
pub use view::{json, list, table};
