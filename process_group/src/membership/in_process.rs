//! State that ranks share if they are threads of one process.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::types::sync::lock;

/// One value of each type, made at its first use. Clones share them.
#[derive(Clone, Default)]
pub struct InProcess {
    values: Arc<Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>>,
}

impl InProcess {
    /// Creates an empty state, for ranks that get clones of it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the value of this type, the same for all clones.
    pub fn get<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        let value =
            Arc::clone(lock(&self.values).entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(T::default())));
        value.downcast().unwrap_or_else(|_| unreachable!("a value is kept under its own type"))
    }
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcess").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_one_value_of_each_type() {
        let (one, other) = (InProcess::new(), InProcess::new());
        *lock(&one.clone().get::<Mutex<u32>>()) = 7;
        assert_eq!((*lock(&one.get::<Mutex<u32>>()), *lock(&other.get::<Mutex<u32>>())), (7, 0));
        assert_eq!(*lock(&one.get::<Mutex<String>>()), "");
    }
}
