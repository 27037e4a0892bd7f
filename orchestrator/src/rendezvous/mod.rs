//! How the processes of a job find each other.
//!
//! [`connect()`] finds the rendezvous of this process and connects to it; [`Server`] serves one. [`core`] makes
//! every decision and does no I/O.

#[cfg(feature = "server")]
mod acceptor;
mod client;
#[cfg_attr(not(feature = "server"), expect(dead_code, reason = "half of it is the server's"))]
pub(crate) mod codec;
mod connect;
pub mod core;

pub mod handshake;
#[cfg(feature = "server")]
mod host;
pub mod listen;
pub mod placement;
#[cfg(feature = "server")]
mod roster_body;
pub(crate) mod runtime_thread;
pub mod secret;
#[cfg(feature = "server")]
mod server;

pub(crate) use client::WeakClient;
pub use client::{Client, Identity};
pub use connect::{Connection, Environment, connect, process_environment};
#[cfg(feature = "server")]
pub use server::{Beat, Server};
