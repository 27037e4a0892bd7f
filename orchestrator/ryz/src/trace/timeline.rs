//! The calls as a timeline in the Chrome trace event format, which Perfetto and Chrome open. Pure.

use ryzanstein_process_group::{CallRecord, FlightRecord};
use serde_json::{Value, json};

/// Returns the events: one process a rank, one thread a group, one slice a call. Times are microseconds since the first call.
pub fn timeline(records: &[FlightRecord]) -> Value {
    let calls = records.iter().flat_map(|record| record.groups.iter().flat_map(|group| &group.calls));
    let start = calls.map(|call| call.enqueued_ns).min().unwrap_or(0);
    let mut events = Vec::new();
    for record in records {
        let pid = record.rank.0;
        let name = format!("rank {pid} ({}, pid {})", record.host, record.pid);
        events.push(json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}));
        for (tid, group) in record.groups.iter().enumerate() {
            let name = json!({"name": group.name});
            events.push(json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": name}));
            events.extend(group.calls.iter().map(|call| slice(call, record, tid, start)));
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ns"})
}

fn slice(call: &CallRecord, record: &FlightRecord, tid: usize, start: u64) -> Value {
    let microseconds = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
    let end = call.returned_ns.unwrap_or(record.dumped_ns);
    json!({
        "ph": "X",
        "name": call.fingerprint.operation.to_string(),
        "cat": call.outcome,
        "pid": record.rank,
        "tid": tid,
        "ts": microseconds(start, call.enqueued_ns),
        "dur": microseconds(call.enqueued_ns, end),
        "args": {
            "number": call.number,
            "calls": call.calls,
            "call": call.fingerprint.to_string(),
            "path": call.path,
            "outcome": call.outcome,
        },
    })
}
