//! Files of weights.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ryzanstein_tensor_parallel::fuzzing::safetensors(bytes));
