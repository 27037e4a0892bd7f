//! Authenticated links between ranks: how they are made, secured, and what travels on them. No collective is known here.

pub(crate) mod mesh;
pub mod security;
pub(crate) mod wire;
