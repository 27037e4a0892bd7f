//! The errors of probes.

use std::io;
use std::process::ExitStatus;
use std::time::Duration;

use ryzanstein_process_group::device::{DeviceError, Missing};
use ryzanstein_process_group::nvml::NvmlError;

/// The reason why a probe could not read a fact. None of these ends the examination: each becomes a finding.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The operating system refused.
    #[error(transparent)]
    System(#[from] io::Error),
    /// A library cannot be used.
    #[error(transparent)]
    Library(#[from] Missing),
    /// CUDA refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// NVIDIA's management library cannot be used, or refused.
    #[error(transparent)]
    Nvml(#[from] NvmlError),
    /// The process of the trial failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The process of the trial reports this failure.
    #[error("{0}")]
    Reported(String),
}

/// The reason why a probe's process gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The process could not be started.
    #[error("it cannot be started: {0}")]
    Spawn(#[source] io::Error),
    /// Waiting for the process failed.
    #[error("it cannot be waited for: {0}")]
    Wait(#[source] io::Error),
    /// The process was killed at its deadline.
    #[error("it did not finish within {} s", .0.as_secs())]
    Deadline(Duration),
    /// The process failed.
    #[error("it ended with {status}: {stderr}")]
    Failed {
        /// Exit status of the process.
        status: ExitStatus,
        /// The last line of its standard error.
        stderr: String,
    },
    /// The process printed something other than an answer.
    #[error("it answered `{0}`")]
    Answer(String),
}

/// The reason why a trial group did not start or compute.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The error of the first rank that failed.
    #[error(transparent)]
    Rank(#[from] ryzanstein_process_group::Error),
    /// The system has no thread for a rank.
    #[error("no thread for a rank: {0}; raise `ulimit -u`, or the container's limit on processes")]
    Thread(#[source] io::Error),
    /// A rank panicked.
    #[error("a rank panicked")]
    Panicked,
    /// The trial has no ranks.
    #[error("a trial needs at least one rank")]
    NoRanks,
}
