//! Memory that a rank may allocate.

use std::sync::atomic::{AtomicU64, Ordering};

use super::error::DeviceError;

/// The memory that a rank may allocate, and the memory that it has allocated.
#[derive(Debug)]
pub(crate) struct Budget {
    device: u32,
    total: u64,
    fraction: f32,
    allocated: AtomicU64,
    /// Bytes of these that a pool keeps for later.
    idle: AtomicU64,
}

/// GPU memory of one rank, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryUse {
    /// Bytes in buffers that are in use.
    pub used: u64,
    /// Bytes allocated from the driver: `used`, and those that pools keep for later.
    pub reserved: u64,
    /// Bytes that the rank may allocate.
    pub limit: u64,
}

impl MemoryUse {
    /// Returns the share of `reserved` that is not used, from 0 to 1; none if nothing is reserved.
    pub fn fragmentation(&self) -> Option<f64> {
        (self.reserved > 0)
            .then(|| (self.reserved - self.used.min(self.reserved)) as f64 / self.reserved as f64)
    }
}

impl Budget {
    pub(super) fn new(device: u32, total: u64, fraction: f32) -> Self {
        Self { device, total, fraction, allocated: AtomicU64::new(0), idle: AtomicU64::new(0) }
    }

    pub(super) fn limit(&self) -> u64 {
        (self.total as f64 * f64::from(self.fraction)) as u64
    }

    pub(super) fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    pub(super) fn take(&self, wanted: u64) -> Result<(), DeviceError> {
        let budget = self.limit();
        let outcome = self.allocated.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
            held.checked_add(wanted).filter(|sum| *sum <= budget)
        });
        outcome.map(drop).map_err(|allocated| DeviceError::Budget {
            device: self.device,
            wanted,
            allocated,
            budget,
            total: self.total,
            fraction: self.fraction,
        })
    }

    pub(super) fn memory_use(&self) -> MemoryUse {
        let reserved = self.allocated();
        // Two counters, read one after the other.
        let idle = self.idle.load(Ordering::Relaxed).min(reserved);
        MemoryUse { used: reserved - idle, reserved, limit: self.limit() }
    }

    /// Notes that a pool keeps this number of bytes for later.
    pub(super) fn keep_idle(&self, bytes: u64) {
        self.idle.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Notes that this number of those bytes is used again, or freed.
    pub(super) fn end_idle(&self, bytes: u64) {
        self.idle.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_holds_and_takes_back() {
        let budget = Budget::new(0, 1000, 0.5);
        budget.take(300).unwrap();
        let error = budget.take(201).unwrap_err().to_string();
        assert!(
            error.contains("201 bytes more are wanted and 300 are allocated") && error.contains("1 over"),
            "{error}"
        );
        budget.take(200).unwrap();
        budget.give_back(300);
        assert_eq!((budget.allocated(), budget.limit()), (200, 500));
        budget.keep_idle(50);
        let memory = budget.memory_use();
        assert_eq!((memory.used, memory.reserved, memory.limit), (150, 200, 500));
        assert_eq!(memory.fragmentation(), Some(0.25));
        budget.end_idle(50);
        assert_eq!(budget.memory_use().fragmentation(), Some(0.0));
        assert_eq!(Budget::new(0, 1000, 0.5).memory_use().fragmentation(), None);
        let error = budget.take(u64::MAX).unwrap_err().to_string();
        assert!(error.contains(&format!("{} over", u64::MAX - 500)), "{error}");
    }
}
