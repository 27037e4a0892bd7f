//! Errors of a GPU, and their remedies.

use super::discover::Missing;
use crate::catalogue;

/// An error on a GPU.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A library is missing, is too old or lacks functions.
    #[error(transparent)]
    Missing(#[from] Missing),

    /// No GPU for this rank.
    #[error(
        "local rank {local_rank} needs GPU {local_rank}, and CUDA shows this process {}",
        Self::shown(*.count)
    )]
    NoDevice {
        /// The rank's position on its host, which is the number of its GPU.
        local_rank: u32,
        /// Number of GPUs.
        count: u32,
    },

    /// A function of CUDA returned an error.
    #[error("{call} failed on GPU {device} with CUDA error {code} ({name}): {text}{}", remedy(.name))]
    Driver {
        /// The function.
        call: &'static str,
        /// CUDA's number of the GPU.
        device: u32,
        /// CUDA's number of the error.
        code: i32,
        /// CUDA's name of the error.
        name: String,
        /// CUDA's description of the error.
        text: String,
    },

    /// An allocation beyond the budget.
    #[error(
        "GPU {device}: {wanted} bytes more are wanted and {allocated} are allocated; that is {} over the budget of \
         {budget} bytes, device.memory_fraction = {fraction} of {total}; use a smaller model or batch, more GPUs, or a \
         larger fraction", .wanted.saturating_add(*.allocated).saturating_sub(*.budget)
    )]
    Budget {
        /// CUDA's number of the GPU.
        device: u32,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that this rank has already allocated.
        allocated: u64,
        /// Bytes that it may allocate.
        budget: u64,
        /// Bytes of the GPU.
        total: u64,
        /// The configured fraction.
        fraction: f32,
    },

    /// The GPU has less memory left than the budget allows, because of other processes.
    #[error(
        "GPU {device}: {wanted} bytes are wanted and only {free} of {total} are free, of which this rank holds \
         {allocated}; end what else runs on this GPU (`nvidia-smi` names it)"
    )]
    OutOfMemory {
        /// CUDA's number of the GPU.
        device: u32,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes that this rank has already allocated.
        allocated: u64,
        /// Bytes of the GPU.
        total: u64,
    },

    /// The run-time compiler rejected a kernel.
    #[error("kernel `{kernel}` does not compile for {architecture} ({status}):\n{log}")]
    Compile {
        /// Name of the source.
        kernel: String,
        /// The target architecture.
        architecture: String,
        /// The compiler's name of the error.
        status: String,
        /// The compiler's log.
        log: String,
    },

    /// The program asked for something impossible.
    #[error("{0}")]
    Invalid(String),
}

impl DeviceError {
    /// Describes the number of visible GPUs, and a remedy.
    pub(crate) fn shown(count: u32) -> String {
        if count == 0 {
            return "none; see whether `nvidia-smi` lists GPUs, and let CUDA_VISIBLE_DEVICES name them or unset it".into();
        }
        let ranks = if count == 1 { "rank" } else { "ranks" };
        format!("{count}; start at most {count} {ranks} on this host, or let CUDA_VISIBLE_DEVICES show more")
    }

    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::Invalid(reason.into())
    }

    /// Returns CUDA's number of the error, if it is an error of CUDA.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Driver { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// Returns the remedy for an error of CUDA, as the end of a sentence; empty if none is known.
fn remedy(name: &str) -> String {
    catalogue::remedy(name).map_or_else(String::new, |remedy| format!("; {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_over_the_budget_says_the_sums() {
        let error = DeviceError::Budget {
            device: 1,
            wanted: 30,
            allocated: 80,
            budget: 90,
            total: 100,
            fraction: 0.9,
        };
        let text = error.to_string();
        for word in ["GPU 1", "30 bytes", "80 are allocated", "20 over", "90 bytes", "0.9 of 100"] {
            assert!(text.contains(word), "`{word}` is not in: {text}");
        }
    }

    #[test]
    fn an_error_of_cuda_ends_with_what_to_do() {
        let error = |code, name: &str| DeviceError::Driver {
            call: "cuMemAlloc_v2",
            device: 1,
            code,
            name: name.into(),
            text: "words".into(),
        };
        let text = error(2, "CUDA_ERROR_OUT_OF_MEMORY").to_string();
        assert!(text.contains("(CUDA_ERROR_OUT_OF_MEMORY): words; end what else runs on the GPU"), "{text}");
        let text = error(1, "CUDA_ERROR_INVALID_VALUE").to_string();
        assert!(text.ends_with("(CUDA_ERROR_INVALID_VALUE): words"), "{text}");
    }

    #[test]
    fn a_missing_gpu_names_the_local_rank_and_how_many_there_are() {
        let text = DeviceError::NoDevice { local_rank: 3, count: 2 }.to_string();
        assert!(text.contains("local rank 3") && text.contains("shows this process 2"), "{text}");
        assert!(text.contains("start at most 2 ranks"), "{text}");
    }

    #[test]
    fn where_no_gpu_is_visible_it_is_said_how_to_see_some() {
        let text = DeviceError::NoDevice { local_rank: 0, count: 0 }.to_string();
        assert!(text.contains("`nvidia-smi`") && text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
        assert!(!text.contains("start at most"), "{text}");
    }
}
