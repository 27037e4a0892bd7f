//! The contents of a heartbeat.

use std::collections::BTreeSet;

use ryzanstein_process_group::device::{Device, MemoryUse, MemoryWatch};
use ryzanstein_process_group::{FlightRecorder, GroupActivity};

use super::gpu::Sampler;
use crate::metric_names as names;
use crate::status::wire;
use crate::supervisor::proc::Process;

/// Maximum number of groups in a report. A rank usually has a handful.
const MOST_GROUPS: usize = 64;
/// Maximum number of bytes of the groups.
const MOST_BYTES: usize = 48 << 10;

/// The sources of a report.
pub(super) struct Source {
    flight: FlightRecorder,
    memory: Option<MemoryWatch>,
    gpu: Option<Sampler>,
    gauges: Gauges,
}

impl Source {
    pub(super) fn new(flight: FlightRecorder, device: Option<&Device>) -> Self {
        let gpu = device.and_then(|device| Sampler::start(device.info().uuid.clone()));
        Self { flight, memory: device.map(Device::memory_watch), gpu, gauges: Gauges::default() }
    }

    /// Returns the current report. Waits for nothing but `/proc`.
    pub(super) fn report(&mut self) -> wire::Report {
        let report = wire::Report {
            groups: shown(self.flight.activity()),
            resident_bytes: Process::read(std::process::id()).map(|process| process.resident_bytes),
            gpu: self.gpu.as_ref().and_then(Sampler::latest),
            gpu_memory: self.memory.as_ref().and_then(MemoryWatch::read).map(gpu_memory),
            leaving: false,
        };
        measure(&report, &mut self.gauges);
        report
    }
}

/// Returns `world`, the group of all ranks, and the newest others, in the order in which they were made.
fn shown(groups: Vec<GroupActivity>) -> Vec<GroupActivity> {
    let (world, others): (Vec<_>, Vec<_>) = groups.into_iter().partition(|group| group.name == "world");
    let (worlds, mut bytes, mut shown) = (world.len(), 0, Vec::new());
    // Names list members, so those of large groups are long. A report longer than the launcher's limit would be refused.
    for group in world.into_iter().chain(others.into_iter().rev()).take(MOST_GROUPS) {
        bytes += serde_json::to_vec(&group).map_or(0, |json| json.len());
        if bytes > MOST_BYTES {
            break;
        }
        shown.push(group);
    }
    let newest = worlds.min(shown.len());
    shown[newest..].reverse();
    shown
}

fn gpu_memory(memory: MemoryUse) -> wire::GpuMemory {
    wire::GpuMemory {
        used_bytes: memory.used,
        reserved_bytes: memory.reserved,
        limit_bytes: memory.limit,
        fragmentation: memory.fragmentation(),
    }
}

/// The gauges that have been set.
#[derive(Default)]
struct Gauges(BTreeSet<&'static str>);

impl Gauges {
    /// Sets a gauge. A value that has never been known is absent. A value that is no longer known is not a number.
    fn set(&mut self, metric: names::Metric, value: Option<f64>) {
        if value.is_some() {
            self.0.insert(metric.name);
        }
        if self.0.contains(metric.name) {
            metrics::gauge!(metric.name).set(value.unwrap_or(f64::NAN));
        }
    }
}

/// Exports the same report as metrics.
fn measure(report: &wire::Report, gauges: &mut Gauges) {
    let mut set = |metric, value| gauges.set(metric, value);
    set(names::RESIDENT_BYTES, report.resident_bytes.map(|bytes| bytes as f64));
    if let Some(memory) = &report.gpu_memory {
        set(names::GPU_USED_BYTES, Some(memory.used_bytes as f64));
        set(names::GPU_RESERVED_BYTES, Some(memory.reserved_bytes as f64));
        set(names::GPU_LIMIT_BYTES, Some(memory.limit_bytes as f64));
        set(names::GPU_FRAGMENTATION, memory.fragmentation);
    }
    let Some(wire::Gpu { lost, sample: gpu, .. }) = &report.gpu else { return };
    set(names::GPU_LOST, Some(f64::from(u8::from(*lost))));
    set(names::GPU_UTILIZATION, gpu.utilization.map(|percent| f64::from(percent) / 100.0));
    set(names::GPU_TEMPERATURE, gpu.temperature.map(f64::from));
    set(names::GPU_DEVICE_USED_BYTES, gpu.memory_used_bytes.map(|bytes| bytes as f64));
    set(names::GPU_DEVICE_BYTES, gpu.memory_total_bytes.map(|bytes| bytes as f64));
    set(names::GPU_THROTTLED, gpu.throttled_by.as_ref().map(|by| f64::from(u8::from(!by.is_empty()))));
    set(names::GPU_ECC_CORRECTED, gpu.ecc_corrected.map(|errors| errors as f64));
    set(names::GPU_ECC_UNCORRECTED, gpu.ecc_uncorrected.map(|errors| errors as f64));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_groups_world_and_the_newest_are_shown() {
        let activity = |name: String| GroupActivity { name, ..GroupActivity::default() };
        let named = |names: &[String]| names.iter().cloned().map(activity).collect::<Vec<_>>();
        let names: Vec<String> =
            ["world".to_owned()].into_iter().chain((0..100).map(|i| format!("g{i}"))).collect();
        let few: Vec<String> = shown(named(&names[..3])).into_iter().map(|group| group.name).collect();
        assert_eq!(few, names[..3]);
        let many: Vec<String> = shown(named(&names)).into_iter().map(|group| group.name).collect();
        assert_eq!(many.len(), MOST_GROUPS);
        assert_eq!((&*many[0], &*many[1], &*many[MOST_GROUPS - 1]), ("world", "g37", "g99"));
        let long: Vec<String> = ["world".to_owned()]
            .into_iter()
            .chain((0..9).map(|i| format!("{i}{}", "x".repeat(20 << 10))))
            .collect();
        let fits: Vec<String> = shown(named(&long)).into_iter().map(|group| group.name).collect();
        assert_eq!(fits.len(), 3);
        assert!(fits[0] == "world" && fits[1].starts_with('7') && fits[2].starts_with('8'));
    }

    #[test]
    #[cfg(feature = "telemetry")]
    fn a_figure_that_is_not_known_any_more_is_not_a_number_and_one_that_never_was_is_absent() {
        use ryzanstein_process_group::nvml::GpuSample;

        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
        let page = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            let mut gauges = Gauges::default();
            let mut report = wire::Report::default();
            let sample = GpuSample { temperature: Some(61), ..GpuSample::default() };
            report.gpu = Some(wire::Gpu { sample, ..wire::Gpu::default() });
            measure(&report, &mut gauges);
            assert!(page.render().contains("ryz_gpu_temperature_celsius 61"), "{}", page.render());
            // The sample is stale.
            report.gpu = Some(wire::Gpu::default());
            measure(&report, &mut gauges);
        });
        let text = page.render();
        assert!(text.contains("ryz_gpu_temperature_celsius NaN"), "{text}");
        assert!(!text.contains("ryz_gpu_ecc_corrected"), "{text}");
    }
}
