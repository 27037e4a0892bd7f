//! How the processes of a job find each other.
//!
//! [`connect()`] finds the rendezvous of this process and connects to it; [`Server`] serves one. [`core`] makes
//! every decision and does no I/O.

mod acceptor;
mod client;
mod codec;
mod connect;
pub mod core;

pub mod handshake;
pub mod listen;
mod runtime_thread;
pub mod secret;
mod server;

pub use client::{Client, Identity};
pub use connect::{Connection, Environment, connect};
pub use server::Server;
