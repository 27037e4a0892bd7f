//! Why a probe found nothing out.

use std::io;
use std::process::ExitStatus;
use std::time::Duration;

use ryzanstein_process_group::device::{DeviceError, Missing};
use ryzanstein_process_group::nvml::NvmlError;

/// Why a probe could not read a fact. None of these ends the examination: each becomes a finding.
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
    /// The process that was to try it failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The process that tried it reports this failure.
    #[error("{0}")]
    Reported(String),
}

/// Why a probe's process gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It could not be started.
    #[error("it cannot be started: {0}")]
    Spawn(#[source] io::Error),
    /// It could not be waited for.
    #[error("it cannot be waited for: {0}")]
    Wait(#[source] io::Error),
    /// It was killed at its deadline.
    #[error("it did not finish within {} s", .0.as_secs())]
    Deadline(Duration),
    /// It failed.
    #[error("it ended with {status}: {stderr}")]
    Failed {
        /// How it ended.
        status: ExitStatus,
        /// The last line it wrote to standard error.
        stderr: String,
    },
    /// It printed something else than an answer.
    #[error("it answered `{0}`")]
    Answer(String),
}

/// Why a trial group did not come up or compute.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The error of the first rank that failed.
    #[error(transparent)]
    Rank(#[from] ryzanstein_process_group::Error),
    /// A rank panicked.
    #[error("a rank panicked")]
    Panicked,
    /// A trial of no ranks.
    #[error("a trial needs at least one rank")]
    NoRanks,
}
