//! Bytes on a link between two ranks. Pure: no socket.
//!
//! A link begins with a [`hello`] that proves both ends know the job's secret, and then carries [`frame`]s.

pub(crate) mod fingerprint;
pub(crate) mod frame;
pub(crate) mod hello;
