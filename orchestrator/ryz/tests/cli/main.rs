//! The `ryz` command as a user meets it: real processes, real signals, real models.

mod attacks;
mod bench;
mod bench_vary;
mod blame;
mod doctor;
mod documentation;
mod exit_codes;
mod explain;
mod generate;
mod joining;
mod launcher;
mod manifests;
mod nccl;
mod output;
mod panics;
mod plan;
mod reference;
mod spans;
mod status;
mod suites;
mod support;
mod terminal;
mod topo;
mod trace;
mod tune;
