//! The state of a job: what its ranks report of themselves, and what its launcher knows of them.
//!
//! A launcher sends [`Job`] to each client of its socket, as the JSON of `ryz status`. Ranks send a [`Report`] about once a second
//! over the control plane, in JSON too, which has no infinite numbers. What is not known is `None`, never zero.

use bytes::Bytes;
use ryzanstein_process_group::GroupActivity;
use ryzanstein_process_group::nvml::GpuSample;
use serde::{Deserialize, Serialize};

/// The job and each of its ranks, as the launcher knows them now.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The process that serves this: the supervisor of the ranks. It identifies the job on its host.
    #[serde(rename = "job")]
    pub pid: u32,
    /// The setting `job.name`.
    pub name: String,
    /// The launcher's host.
    pub host: String,
    /// The program of the ranks, with its arguments.
    pub program: String,
    /// The epoch.
    pub epoch: u64,
    /// Number of ranks on all nodes.
    pub world_size: u32,
    /// Age of the job.
    pub uptime_s: f64,
    /// The ranks of this node. The launcher of the first node adds those of other nodes that have reported.
    pub ranks: Vec<Rank>,
}

/// A rank, from its launcher's point of view.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Rank {
    /// Its number.
    pub rank: u32,
    /// Its process. Absent for a rank of another node.
    pub pid: Option<u32>,
    /// Its state.
    pub state: State,
    /// The kernel's letter for the process: R runs, S sleeps, D cannot be interrupted, T is stopped, Z is dead and not reaped.
    pub process_state: Option<String>,
    /// The system call, or the function of the kernel, in which its first thread waits.
    pub waits_in: Option<String>,
    /// CPU time of the process, or of the program that it waits for, as with `sh -c PROGRAM`. Absent for a rank of another node.
    pub cpu_s: Option<f64>,
    /// The processors that the same process may use, in the format of Linux: `0-3,8`.
    pub cpus: Option<String>,
    /// The exit code of a process that has exited.
    pub exit_code: Option<i32>,
    /// The signal that ended the process.
    pub signal: Option<i32>,
    /// Age of the last report. Absent for a program that sends none.
    pub heartbeat_age_s: Option<f64>,
    /// With [`State::NoProgress`]: the call that others wait in.
    pub no_progress: Option<NoProgress>,
    /// Its groups, if it reports.
    pub groups: Option<Vec<GroupActivity>>,
    /// Resident memory of the process.
    pub resident_bytes: Option<u64>,
    /// Its GPU, if it reports one.
    pub gpu: Option<Gpu>,
    /// Its memory on that GPU.
    pub gpu_memory: Option<GpuMemory>,
}

/// The state of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The process runs, and nothing is known to be wrong.
    #[default]
    Running,
    /// Other ranks wait for it in a call that it has not begun.
    NoProgress,
    /// It has stopped sending heartbeats, but is neither dead nor stopped.
    Silent,
    /// A signal stopped it.
    Stopped,
    /// It has exited, or a signal ended it.
    Exited,
}

/// A call in which others wait for a rank.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct NoProgress {
    /// The group's name.
    pub group: String,
    /// The number of the call.
    pub call: u64,
    /// Its operation.
    pub operation: String,
    /// Number of ranks that wait in that call.
    pub waiting: u32,
    /// Waiting time of the first of them.
    pub waited_s: f64,
}

/// A rank's report on itself.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Its groups.
    pub groups: Vec<GroupActivity>,
    /// Resident memory of the process.
    pub resident_bytes: Option<u64>,
    /// The GPU of this rank, if it has one.
    pub gpu: Option<Gpu>,
    /// Memory allocated by this rank on it.
    pub gpu_memory: Option<GpuMemory>,
    /// The rank leaves the job in good order: no report follows.
    pub leaving: bool,
}

impl Report {
    pub(crate) fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("every report has a form in JSON").into()
    }
}

/// NVML's report on a GPU.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Gpu {
    /// Its identity.
    pub uuid: String,
    /// It has fallen off the bus. Nothing else is known then.
    pub lost: bool,
    /// Its figures.
    #[serde(flatten)]
    pub sample: GpuSample,
    /// Age of all this. It grows while the driver does not answer.
    pub age_s: f64,
}

/// A rank's memory on its GPU.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct GpuMemory {
    /// Bytes in use.
    pub used_bytes: u64,
    /// `used_bytes` and what pools keep for later.
    pub reserved_bytes: u64,
    /// The largest allowed number of bytes.
    pub limit_bytes: u64,
    /// The share of reserved bytes that is not used, from 0 to 1.
    pub fragmentation: Option<f64>,
}

#[cfg(test)]
mod tests {
    use ryzanstein_process_group::{CurrentCall, RecentLatency};

    use super::*;

    fn decode(bytes: &[u8]) -> Option<Report> {
        serde_json::from_slice(bytes).ok()
    }

    #[test]
    fn a_report_survives_the_wire_and_a_part_of_one_is_refused() {
        let current = CurrentCall { number: 41, operation: "send".into(), is_message: true, elapsed_s: 5.2 };
        let recent = RecentLatency { calls: 40, median_us: 120.5, p99_us: 900.0 };
        let group = GroupActivity {
            name: "world".into(),
            begun: Some(41),
            operation: Some("barrier".into()),
            current: Some(current),
            recent: Some(recent),
            ..GroupActivity::default()
        };
        let sample = GpuSample { throttled_by: Some(vec!["heat".into()]), ..GpuSample::default() };
        let gpu = Gpu { sample, age_s: 0.5, ..Gpu::default() };
        let memory = GpuMemory { used_bytes: u64::MAX, fragmentation: Some(0.25), ..GpuMemory::default() };
        let report = Report {
            groups: vec![group, GroupActivity::default()],
            resident_bytes: Some(0),
            gpu: Some(gpu),
            gpu_memory: Some(memory),
            leaving: true,
        };
        let bytes = report.encode();
        assert_eq!(decode(&bytes), Some(report));
        for length in 0..bytes.len() {
            assert!(decode(&bytes[..length]).is_none(), "{length}");
        }
        assert!(decode(&[&bytes[..], b"x"].concat()).is_none());
        let infinite =
            Report { gpu: Some(Gpu { age_s: f64::INFINITY, ..Gpu::default() }), ..Report::default() };
        assert_eq!(decode(&infinite.encode()), None, "it could not be shown");
    }

    #[test]
    fn the_json_of_a_job_has_these_names_and_this_order() {
        let example = r#"{"job":4667,"name":"ryzanstein","host":"node0","program":"./engine","epoch":1,"world_size":2,"uptime_s":61.0,"ranks":[{"rank":1,"pid":4675,"state":"no_progress","process_state":"S","waits_in":"futex","cpu_s":0.5,"cpus":"0-3","exit_code":null,"signal":null,"heartbeat_age_s":0.4,"no_progress":{"group":"world","call":41,"operation":"all_reduce","waiting":1,"waited_s":5.4},"groups":[{"name":"world","size":2,"failed":false,"begun":40,"operation":"barrier","ended":40,"current":{"number":41,"operation":"send","is_message":true,"elapsed_s":0.1},"calls":27,"recent":{"calls":27,"median_us":95.2,"p99_us":3380.1}}],"resident_bytes":24190976,"gpu":{"uuid":"GPU-1","lost":false,"utilization":90,"memory_used_bytes":1,"memory_total_bytes":2,"temperature":61,"throttled_by":["heat"],"ecc_corrected":0,"ecc_uncorrected":0,"age_s":0.2},"gpu_memory":{"used_bytes":1,"reserved_bytes":2,"limit_bytes":3,"fragmentation":0.5}}]}"#;
        let job: Job = serde_json::from_str(example).expect("a job");
        assert_eq!(serde_json::to_string(&job).expect("JSON"), example);
    }
}
