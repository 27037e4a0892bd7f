//! Helpers for the tests of the examples.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// A generous deadline, because the machine may be busy.
pub(crate) const LONG: Duration = Duration::from_secs(300);

/// The path of a program that cargo built into this test's target folder.
pub(crate) fn built(program: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(Path::parent).unwrap().join(program);
    assert!(
        program.exists(),
        "there is no {}; `cargo build --workspace --bins` builds it",
        program.display()
    );
    program
}
