//! Panics of libraries that read other people's files.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ryzanstein_process_group::panic_message;

/// Calls a library that panics on some files. Returns the message of a panic.
pub(super) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    CATCHES.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    CATCHES.set(false);
    outcome.map_err(|panic| format!("panicked: {}", panic_message(&*panic)))
}

thread_local! {
    static CATCHES: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if this crate would turn a panic of this thread into an error now, so that a panic hook need not report it.
pub fn catches_panics() -> bool {
    CATCHES.get()
}
