//! What a rank may allocate.

use std::sync::atomic::{AtomicU64, Ordering};

use super::error::DeviceError;

/// What a rank may allocate and what it has.
#[derive(Debug)]
pub(crate) struct Budget {
    device: u32,
    total: u64,
    fraction: f32,
    allocated: AtomicU64,
}

impl Budget {
    pub(super) fn new(device: u32, total: u64, fraction: f32) -> Self {
        Self { device, total, fraction, allocated: AtomicU64::new(0) }
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
        let error = budget.take(u64::MAX).unwrap_err().to_string();
        assert!(error.contains(&format!("{} over", u64::MAX - 500)), "{error}");
    }
}
