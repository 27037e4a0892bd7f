//! Bytes on a link between two ranks. Pure: no socket.
//!
//! A link begins with the [handshake](crate::link::security::Handshake) of all connections, and then carries [`frame`]s.

pub(crate) mod fingerprint;
pub(crate) mod frame;
