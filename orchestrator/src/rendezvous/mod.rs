//! How the processes of a job find each other.
//!
//! [`connect`] picks and reaches the rendezvous of this process; [`Server`] is one that others connect to. Between them
//! is [`core`], which decides everything and touches nothing.

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
