//! The rendezvous, at which the processes of a job find each other.
//!
//! [`connect()`] finds the rendezvous of this process and connects to it; [`Server`] serves one. `core` makes
//! every decision and does no I/O.

mod acceptor;
mod client;
pub(crate) mod codec;
mod connect;
pub(crate) mod core;
mod host;
pub mod listen;
#[doc(hidden)]
pub mod placement;
mod roster_body;
pub(crate) mod secret;
mod server;

pub(crate) use client::WeakClient;
pub use client::{Client, Identity};
pub use connect::{Connection, Environment, connect, process_environment};
pub use server::{Heartbeat, Server};
