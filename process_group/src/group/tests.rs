//! What becomes of a group when what its user or its backend gives it misbehaves.

use super::*;
use crate::buffer::{Buffer, BufferMut, View, ViewMut};
use crate::call::ReduceOp;
use crate::testing::in_time;

/// A buffer that cannot be written.
struct Fragile([f32; 4]);

impl Buffer for Fragile {
    fn view(&self) -> View<'_> {
        self.0.view()
    }
}

impl BufferMut for Fragile {
    fn view_mut(&mut self) -> ViewMut<'_> {
        panic!("this buffer is torn");
    }
}

#[test]
fn a_buffer_that_panics_on_the_worker_fails_the_group_and_hangs_nobody() {
    let mut ranks = ProcessGroup::loopback(2);
    let mut other = ranks.pop().unwrap();
    let mut group = ranks.pop().unwrap();
    let outcome = in_time(move || {
        let torn = group.all_reduce_async(Fragile([1.0; 4]), ReduceOp::Sum).unwrap();
        let behind = group.all_reduce_async(vec![1.0f32; 4], ReduceOp::Sum).unwrap();
        let last = group.barrier().unwrap_err();
        (torn.wait().map(drop).unwrap_err(), behind.wait().unwrap_err(), last)
    });
    assert!(outcome.0.to_string().contains("this buffer is torn"), "{}", outcome.0);
    assert!(matches!(outcome.1, Error::Poisoned(_)), "{}", outcome.1);
    assert!(matches!(outcome.2, Error::Poisoned(_)), "{}", outcome.2);
    let told = in_time(move || other.barrier().unwrap_err());
    assert!(told.to_string().contains("this buffer is torn"), "{told}");
}

#[test]
fn a_timeout_may_be_as_long_as_durations_are() {
    std::thread::scope(|scope| {
        for mut group in ProcessGroup::loopback(2) {
            scope.spawn(move || {
                group.set_timeout(Duration::MAX);
                group.barrier().unwrap();
                group.monitored_barrier(Duration::MAX).unwrap();
            });
        }
    });
}
