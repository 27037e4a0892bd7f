//! `config.json` and, behind a zero byte, `generation_config.json`.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use ryzanstein_config::Numerics;
use ryzanstein_tensor_parallel::{LlamaConfig, check_world_size};

fuzz_target!(|text: &str| {
    let (config, generation) = match text.split_once('\0') {
        Some((config, generation)) => (config, Some(generation)),
        None => (text, None),
    };
    if let Ok(config) = LlamaConfig::from_json(Path::new("config.json"), config, generation) {
        for world_size in [1, 2, 3, 8] {
            for numerics in Numerics::ALL {
                let _ = check_world_size(&config, world_size, *numerics);
            }
        }
    }
});
