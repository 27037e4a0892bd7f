//! The settings: a file and, behind a zero byte, lines `NAME=value` of the environment. What is accepted can be shown.
#![no_main]

use std::cell::RefCell;
use std::io::{Seek as _, Write as _};

use libfuzzer_sys::fuzz_target;
use ryzanstein_config::{Config, Sources};
use tempfile::NamedTempFile;

thread_local!(static FILE: RefCell<NamedTempFile> = RefCell::new(NamedTempFile::new().expect("a file")));

fuzz_target!(|bytes: &[u8]| {
    let (file, environment) = match bytes.iter().position(|byte| *byte == 0) {
        Some(zero) => (&bytes[..zero], &bytes[zero + 1..]),
        None => (bytes, &[][..]),
    };
    FILE.with_borrow_mut(|there| {
        there.as_file().set_len(0).expect("emptied");
        there.rewind().expect("rewound");
        there.write_all(file).expect("written");
        let environment = String::from_utf8_lossy(environment);
        let variables = environment.lines().filter_map(|line| line.split_once('='));
        let sources = Sources {
            file: Some(there.path().to_owned()),
            environment: variables.map(|(name, value)| (format!("RYZ_{name}"), value.to_owned())).collect(),
            ..Sources::default()
        };
        match Config::load(&sources) {
            Ok(config) => drop(config.entries()),
            Err(error) => drop(error.to_string()),
        }
    });
});
