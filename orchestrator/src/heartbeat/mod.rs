//! A rank's heartbeat: about once a second it reports the rank's state to the launcher, from a separate thread.

mod gpu;
mod report;

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use ryzanstein_process_group::FlightRecorder;
use ryzanstein_process_group::device::Device;

use crate::metric_names;
use crate::rendezvous::WeakClient;
use report::Source;

/// Interval between two heartbeats of a rank.
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of heartbeats a second for one rendezvous: ranks of larger jobs send them less often.
const MOST_A_SECOND: u32 = 1000;
/// Timeout for sending the last heartbeat when a rank leaves.
const FAREWELL: Duration = Duration::from_secs(1);

/// Returns the time between two heartbeats of a rank of such a job.
pub(crate) fn interval(world_size: u32) -> Duration {
    INTERVAL * (world_size / MOST_A_SECOND).max(1)
}

/// Sends heartbeats until it is dropped, which sends a last one that reports the end.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    stop: Option<mpsc::Sender<()>>,
    ended: mpsc::Receiver<()>,
}

impl Heartbeat {
    /// Starts the thread. Without one, the launcher receives no heartbeats of this rank, and the job continues.
    pub(crate) fn start(
        client: WeakClient,
        world_size: usize,
        flight: FlightRecorder,
        device: Option<&Device>,
    ) -> Option<Self> {
        let mut source = Source::new(flight, device);
        let wait = interval(u32::try_from(world_size).unwrap_or(u32::MAX));
        let (stop, stopped) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let beats = move || {
            beat(&client, &mut source, wait, &stopped);
            // The closed channel shows that the resources of this thread are gone.
            drop((client, source));
            drop(end);
        };
        match std::thread::Builder::new().name("ryz-heartbeat".into()).spawn(beats) {
            Ok(_) => Some(Self { stop: Some(stop), ended }),
            Err(error) => {
                tracing::warn!(%error, "no thread for heartbeats: the launcher cannot tell whether this rank makes progress");
                None
            }
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.ended.recv_timeout(FAREWELL);
    }
}

fn beat(client: &WeakClient, source: &mut Source, interval: Duration, stopped: &mpsc::Receiver<()>) {
    let (sent, failed) = (
        metrics::counter!(metric_names::HEARTBEATS.name, "outcome" => "sent"),
        metrics::counter!(metric_names::HEARTBEATS.name, "outcome" => "failed"),
    );
    let mut wait = Duration::ZERO;
    loop {
        let leaving = !matches!(stopped.recv_timeout(wait), Err(RecvTimeoutError::Timeout));
        let started = Instant::now();
        let Some(client) = client.upgrade() else { return };
        let mut report = source.report();
        report.leaving = leaving;
        match client.beat(&report) {
            Ok(()) => sent.increment(1),
            Err(error) => {
                tracing::debug!(%error, "a heartbeat failed");
                failed.increment(1);
            }
        }
        if leaving {
            return;
        }
        wait = interval.saturating_sub(started.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_large_jobs_beat_less_often() {
        assert_eq!([1, 4, 1999].map(interval), [INTERVAL; 3]);
        assert_eq!(interval(10_000), 10 * INTERVAL);
    }
}
