//! Authenticated links between ranks: connection, security and wire format. This module does not know collectives.

pub(crate) mod mesh;
pub mod security;
pub(crate) mod wire;
