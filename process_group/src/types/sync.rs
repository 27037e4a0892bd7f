//! Locks whose poison means nothing.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after a holder has panicked: what these locks guard is whole whenever they are free.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
