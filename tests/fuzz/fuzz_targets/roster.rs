//! Answers of a rendezvous.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ryzanstein_orchestrator::fuzzing::roster(bytes));
