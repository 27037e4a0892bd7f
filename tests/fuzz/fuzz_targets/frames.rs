//! Headers of the data plane.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ryzanstein_process_group::fuzzing::frames(bytes));
