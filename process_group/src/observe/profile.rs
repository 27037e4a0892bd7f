//! Latency and bandwidth of every call, and the newest calls one by one, always on.
//!
//! A call costs two clock readings, two uncontended locks, a comparison with the class of the last call and a histogram increment.
//! Latency is this rank's own time in the call, including the wait for the other ranks. On a GPU it is the time between two events,
//! read some time later without waiting for the GPU; as events cost GPU time, only some calls have them there. The host time to
//! enqueue a call is recorded separately, for each call. Calls in a captured graph are counted at each launch that the group
//! follows, and some of them are timed.

use std::fmt;
use std::mem::discriminant;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::backend::Completion;
use crate::backend::timings::{CallTime, TimedCall, Timings};
use crate::error::Error;
use crate::observe::activity::{GroupActivity, RecentLatency};
use crate::observe::call_history::CallHistory;
use crate::observe::record::GroupRecord;
use crate::paths::Path;
use crate::types::dtype::DType;
use crate::types::metric_names as names;
use crate::types::operation::{CallFingerprint, Operation, ReduceOp};
use crate::types::rank::Rank;
use crate::types::sync::lock;

/// Settings of the record: its content, the limits of slow calls, and the interval of their warnings.
#[derive(Clone, Copy, Debug)]
pub struct Recording {
    /// True if calls are counted and timed by class.
    pub record: bool,
    /// Number of the newest calls that the [flight recorder](crate::FlightRecorder) keeps; 0 turns it off, and the current call of
    /// a rank is then invisible.
    pub newest_calls: usize,
    /// Latency limit: a call is slow if it takes longer than this plus the time that its bytes need at `slow_gbs`.
    pub slow_call: Duration,
    /// Bandwidth of `slow_call`, in 10⁹ bytes per second.
    pub slow_gbs: f64,
    /// Minimum interval between two warnings of one class.
    pub every: Duration,
}

impl Recording {
    /// Returns the time above which a call of `bytes` bytes is slow.
    fn threshold(&self, bytes: u64) -> Duration {
        let moving = Duration::from_nanos((bytes as f64 / self.slow_gbs) as u64);
        self.slow_call.saturating_add(moving)
    }
}

#[derive(Clone, Copy)]
struct Class {
    /// That of the first call: roots and peers make no difference.
    operation: Operation,
    dtype: DType,
    /// Bytes rounded up to a power of two, as its exponent.
    size: u8,
    path: Path,
}

impl PartialEq for Class {
    fn eq(&self, other: &Self) -> bool {
        discriminant(&self.operation) == discriminant(&other.operation)
            && self.operation.reduce_op() == other.operation.reduce_op()
            && (self.dtype, self.size, self.path) == (other.dtype, other.size, other.path)
    }
}

impl Class {
    fn reduction(&self) -> Option<&'static str> {
        self.operation.reduce_op().map(ReduceOp::name)
    }
}

struct Entry {
    calls: u64,
    bytes: u64,
    nanos: u64,
    /// Part of those that was waiting.
    waited_nanos: u64,
    latency: Histogram<u64>,
    /// Number of calls enqueued on a GPU, and the host's time for them.
    enqueued: u64,
    host: Option<Histogram<u64>>,
    /// Number of slow calls since the last warning.
    untold: u64,
    told: Option<Instant>,
    metrics: Metrics,
}

/// The metric handles of one class, so that a call needs no lookup.
struct Metrics {
    calls: metrics::Counter,
    bytes: metrics::Counter,
    seconds: metrics::Histogram,
    wait_seconds: metrics::Histogram,
}

impl Entry {
    fn waited(&mut self, waited: Duration) {
        self.waited_nanos += waited.as_nanos() as u64;
        self.metrics.wait_seconds.record(waited.as_secs_f64());
    }

    fn moved(&mut self, bytes: u64, calls: u64) {
        self.bytes += bytes * calls;
        self.metrics.calls.increment(calls);
        self.metrics.bytes.increment(bytes * calls);
    }
}

/// The record of one group. The group and the readers of the record share it.
pub struct Profile {
    group: Arc<str>,
    rank: Rank,
    members: Vec<Rank>,
    recording: Recording,
    paused: AtomicBool,
    /// True when the group has ended.
    ended: AtomicBool,
    /// Locked for the moment of a read or a write, and not while a call waits.
    recorded: Mutex<Recorded>,
    /// Present until the group ends.
    timings: Mutex<Option<Arc<dyn Timings>>>,
    link_gbs: Option<f64>,
    groups: metrics::Gauge,
}

/// The calls of a group: the newest ones each, and all by their class. One lock for both, as a call takes it at its end for both.
struct Recorded {
    history: CallHistory,
    entries: Entries,
    last: Option<LastCall>,
}

impl Recorded {
    /// Notes that the oldest call in progress has returned.
    fn end(&mut self, completion: Completion, at: Instant) {
        if let Some(last) = &mut self.last {
            last.path = Some(completion.path);
        }
        self.history.end(completion, at);
    }
}

/// A program has a few dozen classes and repeats the same few calls: a list that remembers the position of its last lookup is
/// faster than a hash.
#[derive(Default)]
struct Entries {
    all: Vec<(Class, Entry)>,
    recent: usize,
    newest: Newest,
}

/// Latencies of the newest calls of all classes, in nanoseconds.
#[derive(Clone, Default)]
struct Newest {
    nanos: Vec<u64>,
    next: usize,
}

impl Newest {
    /// Number of calls that count as recent.
    const ROOM: usize = 256;

    fn push(&mut self, nanos: u64) {
        if self.nanos.len() < Self::ROOM {
            self.nanos.push(nanos);
        } else {
            self.nanos[self.next] = nanos;
        }
        self.next = (self.next + 1) % Self::ROOM;
    }

    fn latency(self) -> Option<RecentLatency> {
        let mut sorted = self.nanos;
        sorted.sort_unstable();
        let last = sorted.len().checked_sub(1)?;
        let us = |quantile: f64| sorted[(last as f64 * quantile).round() as usize] as f64 / 1e3;
        Some(RecentLatency { calls: sorted.len(), median_us: us(0.5), p99_us: us(0.99) })
    }
}

/// The newest call of a group.
#[derive(Clone, Copy, Debug)]
pub struct LastCall {
    /// Its number in the group (for messages: in the pair and direction), from 1.
    pub sequence: u64,
    /// Time at which it began.
    pub started: Instant,
    /// Its fingerprint.
    pub fingerprint: CallFingerprint,
    /// Its path; `None` while it is in progress, and when it has failed.
    pub path: Option<Path>,
}

/// Measured figures of one class of calls.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfileRow {
    /// Name of the group.
    pub group: String,
    /// Name of the operation.
    pub op: &'static str,
    /// Name of the reduction, where there is one.
    pub reduction: Option<&'static str>,
    /// Element type.
    pub dtype: DType,
    /// The size class: calls in this row moved at most this many bytes (a power of two), and more than half of it.
    pub bytes_up_to: u64,
    /// Mean bytes of a call: the whole array, as nccl-tests count.
    pub bytes_mean: f64,
    /// The path of the calls.
    pub path: String,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of calls.
    pub calls: u64,
    /// Number of timed calls. On a GPU that is one call of a kind per millisecond, and in a graph the second of a kind and every
    /// 64th after it, or the only one; calls that were made as one group are not timed, nor those in progress. Without any, the
    /// figures below are zero.
    pub timed: u64,
    /// Median latency in microseconds.
    pub median_us: f64,
    /// 90th percentile in microseconds.
    pub p90_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
    /// Maximum latency in microseconds.
    pub max_us: f64,
    /// For calls on a GPU: the host's median time to enqueue one, in microseconds.
    pub host_median_us: Option<f64>,
    /// Sum of the latencies of all timed calls, and of the waits of graphs, in seconds.
    pub total_s: f64,
    /// Part of `total_s` in which this row's calls waited for late ranks, as far as is known: on a GPU, the time by which the first
    /// collective of a graph takes longer than the second of its kind.
    pub waited_s: f64,
    /// Mean bytes / median time, in 10⁹ bytes per second.
    pub algbw_gbs: f64,
    /// `algbw` × the operation's traffic factor.
    pub busbw_gbs: f64,
    /// `busbw` as a share of the rated bandwidth of the rank's links in one direction, according to the driver; for GPUs with
    /// NVLink.
    pub link_share: Option<f64>,
}

/// Returns the factor from `algbw` to `busbw`, as nccl-tests defines it: 2(n−1)/n for all-reduce, (n−1)/n for the operations in
/// which every rank keeps 1/n, else 1.
pub fn bus_factor(operation: &str, world_size: usize) -> f64 {
    let n = world_size.max(1) as f64;
    match operation {
        "all_reduce" => 2.0 * (n - 1.0) / n,
        "all_gather" | "reduce_scatter" | "all_to_all" | "gather" | "scatter" => (n - 1.0) / n,
        _ => 1.0,
    }
}

/// Returns the bytes of the whole array of a call.
pub fn call_bytes(fingerprint: &CallFingerprint, world_size: usize) -> u64 {
    let bytes = (fingerprint.count * fingerprint.dtype.size()) as u64;
    if fingerprint.operation.is_chunked() { bytes * world_size as u64 } else { bytes }
}

impl Profile {
    pub(crate) fn new(
        group: &str,
        rank: Rank,
        members: &[Rank],
        recording: Recording,
        instruments: Option<(Arc<dyn Timings>, Option<f64>)>,
    ) -> Self {
        let (timings, link_gbs) =
            instruments.map_or((None, None), |(timings, link_gbs)| (Some(timings), link_gbs));
        let groups = metrics::gauge!(names::GROUPS.name, "rank" => rank.to_string());
        groups.increment(1);
        Self {
            group: group.into(),
            rank,
            members: members.to_vec(),
            recording,
            paused: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            recorded: Mutex::new(Recorded {
                history: CallHistory::new(recording.newest_calls),
                entries: Entries::default(),
                last: None,
            }),
            timings: Mutex::new(timings),
            link_gbs,
            groups,
        }
    }

    /// Returns the group's name.
    pub(crate) fn group(&self) -> &str {
        &self.group
    }

    /// Ends the profile of a group: adds the calls that the GPU has finished, and drops all state of the backend. Profiles outlive
    /// their groups.
    pub(crate) fn close(&self) {
        self.fetch();
        lock(&self.timings).take();
        self.groups.decrement(1);
        self.ended.store(true, Ordering::Release);
        if !self.has_failed() {
            self.forget_newest();
        }
    }

    /// Frees the memory of the newest calls.
    pub(crate) fn forget_newest(&self) {
        lock(&self.recorded).history = CallHistory::new(0);
    }

    /// Returns true if the group has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns true if the group cannot be used any more.
    pub(crate) fn has_failed(&self) -> bool {
        lock(&self.recorded).history.has_failed()
    }

    /// Records the start of a call, or of `calls` calls of a replay.
    pub(crate) fn begin(&self, fingerprint: &CallFingerprint, number: u64, calls: u64, at: Instant) {
        let Recorded { history, last, .. } = &mut *lock(&self.recorded);
        let sequence = (number + calls).saturating_sub(1);
        *last = Some(LastCall { sequence, started: at, fingerprint: *fingerprint, path: None });
        history.begin(fingerprint, number, calls, at);
    }

    /// Returns the newest call. Does not wait for one that is in progress.
    pub(crate) fn last_call(&self) -> Option<LastCall> {
        lock(&self.recorded).last
    }

    /// Forgets the last call: a report should name no call that the user did not make.
    pub(crate) fn forget_last_call(&self) {
        lock(&self.recorded).last = None;
    }

    /// Records that the oldest call in progress, which began at `started`, has returned.
    pub(crate) fn end(
        &self,
        fingerprint: &CallFingerprint,
        completion: Completion,
        started: Instant,
        returned: Instant,
    ) {
        let Completion { path, enqueued, captured, waited } = completion;
        let mut recorded = lock(&self.recorded);
        recorded.end(completion, returned);
        // A captured call has not run: each launch counts.
        if captured || !self.records() {
            return;
        }
        let elapsed = returned.saturating_duration_since(started);
        if !enqueued {
            let is_slow = self.took(&mut recorded.entries, fingerprint, path, elapsed, waited, 1);
            drop(recorded);
            if is_slow {
                self.tell_slow(fingerprint, path, elapsed);
            }
            return;
        }
        let (entry, _, bytes) = self.entry(&mut recorded.entries, fingerprint, path);
        entry.moved(bytes, 1);
        entry.enqueued += 1;
        let nanos = (elapsed.as_nanos() as u64).max(1);
        entry.host.get_or_insert_with(latencies).saturating_record(nanos);
        let many = entry.enqueued.is_multiple_of(128);
        drop(recorded);
        // Times are fetched before they exceed the capacity of the backend.
        if many {
            self.fetch();
        }
    }

    /// Records that the calls in a graph have been launched, the last of them by `path`.
    pub(crate) fn end_replay(&self, path: Path, counts: &[(CallFingerprint, Path, u64)], returned: Instant) {
        {
            let mut recorded = lock(&self.recorded);
            let completion = Completion { path, enqueued: true, captured: false, waited: Duration::ZERO };
            recorded.end(completion, returned);
            if !self.records() {
                return;
            }
            for (fingerprint, path, count) in counts {
                let (entry, _, bytes) = self.entry(&mut recorded.entries, fingerprint, *path);
                entry.moved(bytes, *count);
                entry.enqueued += count;
            }
        }
        self.fetch();
    }

    /// Records that all calls in progress have ended with an error.
    pub(crate) fn fail(&self, at: Instant) {
        lock(&self.recorded).history.fail(at);
    }

    /// Records that the group cannot be used any more.
    pub(crate) fn give_up(&self, error: &Error) {
        lock(&self.recorded).history.give_up(error);
    }

    /// Returns the record of the newest calls.
    pub(crate) fn flight_record(&self) -> GroupRecord {
        let history = lock(&self.recorded).history.clone();
        history.record(&self.group, &self.members)
    }

    /// Returns the activity of the group at `now`. It does not query a GPU, so it may be called at any time.
    pub(crate) fn activity(&self, now: Instant) -> GroupActivity {
        let (activity, calls, newest) = {
            let Recorded { history, entries, .. } = &*lock(&self.recorded);
            let calls = entries.all.iter().map(|(_, entry)| entry.calls.max(entry.enqueued)).sum();
            (history.activity(&self.group, self.members.len(), now), calls, entries.newest.clone())
        };
        GroupActivity { calls, recent: newest.latency(), ..activity }
    }

    /// Records a failed call.
    pub(crate) fn record_error(&self, operation: Operation, error: &Error) {
        let [rank, group] = self.labels();
        let labels = [rank, group, ("op", operation.name().to_owned()), ("kind", error.kind().to_owned())];
        metrics::counter!(names::ERRORS.name, &labels).increment(1);
    }

    /// Pauses counting and timing while `paused`: calls do not belong to the user then, and none is reported as slow.
    pub(crate) fn pause(&self, paused: bool) {
        // Calls that the GPU has finished so far are counted by the state at their time.
        self.fetch();
        self.paused.store(paused, Ordering::Relaxed);
    }

    fn records(&self) -> bool {
        self.recording.record && !self.paused.load(Ordering::Relaxed)
    }

    /// Adds the calls that the GPU has finished.
    fn fetch(&self) {
        let timings = lock(&self.timings).clone();
        let Some(timings) = timings else { return };
        for TimedCall { call, path, time } in timings.take() {
            if !self.records() {
                continue;
            }
            match time {
                // The call was counted when it was enqueued.
                CallTime::Took(took) => {
                    let zero = Duration::ZERO;
                    if self.took(&mut lock(&self.recorded).entries, &call, path, took, zero, 0) {
                        self.tell_slow(&call, path, took);
                    }
                }
                CallTime::Waited(waited) => {
                    let entries = &mut lock(&self.recorded).entries;
                    let (entry, ..) = self.entry(entries, &call, path);
                    entry.nanos += waited.as_nanos() as u64;
                    entry.waited(waited);
                }
            }
        }
    }

    /// Records the time of a call. Returns true if it was slow.
    fn took(
        &self,
        entries: &mut Entries,
        fingerprint: &CallFingerprint,
        path: Path,
        elapsed: Duration,
        waited: Duration,
        counted: u64,
    ) -> bool {
        let (entry, newest, bytes) = self.entry(entries, fingerprint, path);
        entry.moved(bytes, counted);
        let nanos = elapsed.as_nanos() as u64;
        newest.push(nanos);
        entry.calls += 1;
        entry.nanos += nanos;
        entry.latency.saturating_record(nanos.max(1));
        entry.metrics.seconds.record(nanos as f64 * 1e-9);
        if !waited.is_zero() {
            entry.waited(waited);
        }
        // A late rank does not make a call slow.
        let own = elapsed.saturating_sub(waited);
        own > self.recording.slow_call && own > self.recording.threshold(bytes)
    }

    /// Returns the entry of a call's class, the newest latencies, and the bytes of the call.
    fn entry<'a>(
        &self,
        entries: &'a mut Entries,
        fingerprint: &CallFingerprint,
        path: Path,
    ) -> (&'a mut Entry, &'a mut Newest, u64) {
        let bytes = call_bytes(fingerprint, self.members.len());
        let class = Class {
            operation: fingerprint.operation,
            dtype: fingerprint.dtype,
            size: bytes.next_power_of_two().trailing_zeros() as u8,
            path,
        };
        let Entries { all, recent, newest } = entries;
        if all.get(*recent).is_none_or(|(c, _)| c != &class) {
            *recent = all.iter().position(|(c, _)| c == &class).unwrap_or_else(|| {
                all.push((class, self.new_entry(&class)));
                all.len() - 1
            });
        }
        (&mut all[*recent].1, newest, bytes)
    }

    fn new_entry(&self, class: &Class) -> Entry {
        Entry {
            calls: 0,
            bytes: 0,
            nanos: 0,
            waited_nanos: 0,
            latency: latencies(),
            enqueued: 0,
            host: None,
            untold: 0,
            told: None,
            metrics: self.metrics(class),
        }
    }

    fn metrics(&self, class: &Class) -> Metrics {
        let [rank, group] = self.labels();
        let op = ("op", class.operation.name().to_owned());
        let waits = [rank.clone(), group.clone(), op.clone()];
        let labels = [
            rank,
            group,
            op,
            ("reduction", class.reduction().unwrap_or_default().to_owned()),
            ("dtype", class.dtype.to_string()),
            ("bytes_up_to", size_label(class.size)),
            ("path", class.path.to_string()),
        ];
        Metrics {
            calls: metrics::counter!(names::CALLS.name, &labels),
            bytes: metrics::counter!(names::BYTES.name, &labels),
            seconds: metrics::histogram!(names::SECONDS.name, &labels),
            wait_seconds: metrics::histogram!(names::WAIT_SECONDS.name, &waits),
        }
    }

    /// Returns the labels that all metrics of the group have. Groups that are made again and again from the same ranks share one
    /// name: each name is a time series that a server keeps.
    fn labels(&self) -> [(&'static str, String); 2] {
        let name = self.group.split('#').next().unwrap_or_default();
        [("rank", self.rank.to_string()), ("group", name.to_owned())]
    }

    /// Warns of a slow call, unless its class has been warned of just now. The profile is not locked meanwhile: the log may block.
    #[cold]
    fn tell_slow(&self, fingerprint: &CallFingerprint, path: Path, elapsed: Duration) {
        let (untold, bytes) = {
            let entries = &mut lock(&self.recorded).entries;
            let (entry, _, bytes) = self.entry(entries, fingerprint, path);
            if entry.told.is_some_and(|told| told.elapsed() < self.recording.every) {
                entry.untold += 1;
                return;
            }
            entry.told = Some(Instant::now());
            (std::mem::take(&mut entry.untold), bytes)
        };
        tracing::warn!(
            rank = self.rank.0,
            group = &*self.group,
            op = %fingerprint.operation,
            bytes,
            path = %path,
            milliseconds = elapsed.as_micros() as f64 / 1e3,
            limit_milliseconds = self.recording.threshold(bytes).as_micros() as f64 / 1e3,
            also_slow_since_last_line = untold,
            "slow collective"
        );
    }

    /// Returns all rows, by operation, type, size and path.
    pub fn rows(&self) -> Vec<ProfileRow> {
        self.fetch();
        let entries = &lock(&self.recorded).entries;
        let mut classes: Vec<_> = entries.all.iter().map(|(c, e)| (c, e)).collect();
        classes.sort_by_key(|(c, _)| (c.operation.name(), c.reduction(), c.dtype, c.size, c.path));
        classes.into_iter().map(|(class, entry)| self.row(class, entry)).collect()
    }

    fn row(&self, class: &Class, entry: &Entry) -> ProfileRow {
        let us = |q| entry.latency.value_at_quantile(q) as f64 / 1e3;
        let calls = entry.calls.max(entry.enqueued);
        let mean = entry.bytes as f64 / calls.max(1) as f64;
        let algbw = if entry.calls == 0 { 0.0 } else { mean / (us(0.5) * 1e3) };
        let busbw = algbw * bus_factor(class.operation.name(), self.members.len());
        ProfileRow {
            group: self.group.to_string(),
            op: class.operation.name(),
            reduction: class.reduction(),
            dtype: class.dtype,
            bytes_up_to: 1 << class.size,
            bytes_mean: mean,
            path: class.path.to_string(),
            world_size: self.members.len(),
            // Some of the enqueued calls may be in progress, or in a graph.
            calls,
            timed: entry.calls,
            median_us: us(0.5),
            p90_us: us(0.9),
            p99_us: us(0.99),
            max_us: entry.latency.max() as f64 / 1e3,
            host_median_us: entry.host.as_ref().map(|h| h.value_at_quantile(0.5) as f64 / 1e3),
            total_s: entry.nanos as f64 / 1e9,
            waited_s: entry.waited_nanos as f64 / 1e9,
            algbw_gbs: algbw,
            busbw_gbs: busbw,
            link_share: self
                .link_gbs
                .filter(|_| class.path != Path::Local && entry.calls > 0)
                .map(|link| busbw / link),
        }
    }

    /// Returns the number of calls of an operation so far, of any size.
    pub fn calls(&self, operation: &str) -> u64 {
        let entries = &lock(&self.recorded).entries;
        entries
            .all
            .iter()
            .filter(|(c, _)| c.operation.name() == operation)
            .map(|(_, e)| e.calls.max(e.enqueued))
            .sum()
    }

    /// Clears all records, for instance after a warm-up.
    pub fn clear(&self) {
        self.fetch();
        lock(&self.recorded).entries = Entries::default();
    }
}

/// Returns the size class for metrics. It is coarser than that of rows, as each is a dozen time series: 1 KiB, then factors of 16
/// up to 1 GiB, then all above.
fn size_label(exponent: u8) -> String {
    let bound = (10..=30).step_by(4).find(|bound| exponent <= *bound);
    bound.map_or_else(|| "+Inf".to_owned(), |bound| (1u64 << bound).to_string())
}

/// Creates a histogram of 1 ns to 1 h with two significant digits: 20 KB per class.
fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 3_600_000_000_000, 2).expect("constant bounds are valid")
}

impl fmt::Debug for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profile")
            .field("group", &self.group)
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_in_metrics_are_few_and_hold_every_size() {
        let labels: Vec<String> = (0..64).map(size_label).collect();
        for (exponent, expected) in
            [(0, "1024"), (10, "1024"), (11, "16384"), (30, "1073741824"), (31, "+Inf")]
        {
            assert_eq!(labels[exponent], expected);
        }
        let mut different = labels.clone();
        different.dedup();
        assert_eq!(different.len(), 7, "{different:?}");
    }
}
