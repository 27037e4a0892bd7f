//! Waits for a GPU.

use std::time::{Duration, Instant};

use super::error::DeviceError;

/// Time for which a wait polls without pause before it begins to sleep in between.
const SPIN: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);

/// Polls, first without pause and then with sleeps, until done or until the deadline. Returns true if done.
pub(super) fn poll(
    deadline: Instant,
    mut done: impl FnMut() -> Result<bool, DeviceError>,
) -> Result<bool, DeviceError> {
    let started = Instant::now();
    loop {
        if done()? {
            return Ok(true);
        }
        let now = Instant::now();
        if now >= deadline {
            return Ok(false);
        }
        if now - started < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(NAP.min(deadline - now));
        }
    }
}
