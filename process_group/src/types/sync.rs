//! Locks whose poison is ignored.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after a holder has panicked: the protected data are consistent whenever these locks are free.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
