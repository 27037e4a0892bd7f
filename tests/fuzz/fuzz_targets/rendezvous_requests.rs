//! Requests to a rendezvous, as messages of the protocol, and what its core makes of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ryzanstein_orchestrator::fuzzing::requests(bytes));
