//! The `ryz` command as a user meets it: real processes, real signals, real models.

mod bench;
mod generate;
mod launcher;
mod support;
