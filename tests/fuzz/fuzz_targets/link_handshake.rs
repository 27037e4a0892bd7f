//! What a link between two ranks begins with.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ryzanstein_process_group::fuzzing::link_handshake(bytes));
