//! Messages between the watchdogs of a group on GPUs.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ryzanstein_process_group::fuzzing::control_messages(bytes));
