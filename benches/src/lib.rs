//! What is measured, and the peers measured beside it.
