//! The `ryz` command as a user meets it: real processes, real signals, real models.

mod bench;
mod exit_codes;
mod doctor;
mod generate;
mod launcher;
mod nccl;
mod support;
