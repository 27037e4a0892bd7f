//! `ryz trace`: a folder of two files, split at a zero byte, read, merged and shown in every way.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use ryzanstein_orchestrator::table::Screen;
use ryz::{command, trace};
use tempfile::TempDir;

thread_local!(static FOLDER: RefCell<TempDir> = RefCell::new(TempDir::new().expect("a folder")));

fuzz_target!(|bytes: &[u8]| {
    FOLDER.with_borrow(|folder| {
        for (number, part) in bytes.splitn(2, |byte| *byte == 0).enumerate() {
            std::fs::write(folder.path().join(format!("rank-{number}.json")), part).expect("written");
        }
        match trace::read(folder.path()) {
            Ok(files) => {
                let report = trace::merge(&files);
                drop((command::json(&report), report.table(Screen::PLAIN), trace::timeline(&files.records)));
            }
            Err(error) => drop(error.to_string()),
        }
    });
});
