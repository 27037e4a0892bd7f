//! Queries NVML about a rank's GPU, on a thread that nothing waits for: a faulty driver may not answer.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ryzanstein_process_group::nvml::{GpuHealth, GpuSample, Nvml};
use ryzanstein_process_group::units;

use crate::status::wire;

/// Interval between two samples.
const INTERVAL: Duration = Duration::from_secs(1);
/// Age from which on the figures of a sample are stale: the driver does not answer.
const STALE: Duration = INTERVAL.saturating_mul(5);

type Latest = Arc<Mutex<Option<(Instant, GpuHealth)>>>;

/// The newest sample of one GPU. Sampling ends when this is dropped.
pub(super) struct Sampler {
    uuid: String,
    latest: Latest,
    _stop: mpsc::Sender<()>,
}

impl Sampler {
    /// Starts sampling; `None` if the system gives no thread. Without NVML nothing is ever sampled.
    pub(super) fn start(uuid: String) -> Option<Self> {
        let latest = Latest::default();
        let (stop, stopped) = mpsc::channel();
        let (writer, asked) = (Arc::clone(&latest), uuid.clone());
        let samples = move || sample(&asked, &writer, &stopped);
        std::thread::Builder::new().name("ryz-nvml".into()).spawn(samples).ok()?;
        Some(Self { uuid, latest, _stop: stop })
    }

    /// Returns the newest sample, if there is one; a stale one without its figures.
    pub(super) fn latest(&self) -> Option<wire::Gpu> {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        latest.map(|(taken, health)| gpu(&self.uuid, taken.elapsed(), health))
    }
}

fn sample(uuid: &str, latest: &Latest, stopped: &mpsc::Receiver<()>) {
    let nvml = match Nvml::open() {
        Ok(nvml) => nvml,
        Err(error) => return tracing::debug!(%error, "the GPU is not watched"),
    };
    let mut was_lost = false;
    loop {
        if let Some(health) = nvml.health(uuid) {
            let is_lost = health == GpuHealth::Lost;
            if is_lost && !was_lost {
                tracing::error!(uuid, "this rank's GPU is lost: it does not answer the driver any more");
            }
            was_lost = is_lost;
            *latest.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), health));
        }
        if !matches!(stopped.recv_timeout(INTERVAL), Err(RecvTimeoutError::Timeout)) {
            return;
        }
    }
}

fn gpu(uuid: &str, age: Duration, health: GpuHealth) -> wire::Gpu {
    let (lost, sample) = match health {
        GpuHealth::Present(sample) if age <= STALE => (false, sample),
        GpuHealth::Present(_) => (false, GpuSample::default()),
        // A lost GPU stays lost.
        GpuHealth::Lost => (true, GpuSample::default()),
    };
    wire::Gpu { uuid: uuid.to_owned(), lost, sample, age_s: units::seconds(age) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_gpu_has_no_figures_and_a_quiet_one_no_zeros() {
        let lost = gpu("GPU-1", Duration::from_secs(2), GpuHealth::Lost);
        assert_eq!(lost, wire::Gpu { uuid: "GPU-1".into(), lost: true, age_s: 2.0, ..wire::Gpu::default() });
        let sample = GpuSample { temperature: Some(61), ..GpuSample::default() };
        let quiet = gpu("GPU-1", Duration::ZERO, GpuHealth::Present(sample.clone()));
        assert_eq!((quiet.lost, quiet.sample), (false, sample));
    }

    #[test]
    fn the_figures_of_a_driver_that_does_not_answer_are_forgotten_and_a_lost_gpu_stays_lost() {
        let sample = || GpuHealth::Present(GpuSample { temperature: Some(61), ..GpuSample::default() });
        let [fresh, stale] = [STALE, STALE + INTERVAL];
        assert_eq!(gpu("GPU-1", fresh, sample()).sample.temperature, Some(61));
        let unknown = wire::Gpu { uuid: "GPU-1".into(), age_s: 6.0, ..wire::Gpu::default() };
        assert_eq!(gpu("GPU-1", stale, sample()), unknown);
        assert!(gpu("GPU-1", stale, GpuHealth::Lost).lost);
    }

    #[test]
    fn before_the_first_sample_and_without_nvml_there_is_none() {
        // No GPU has this UUID, with or without NVML.
        let sampler = Sampler::start("GPU-none".into()).expect("a thread");
        assert_eq!(sampler.latest(), None);
    }
}
