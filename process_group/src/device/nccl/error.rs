//! NCCL's codes, and their remedies.

use std::fmt;

use crate::catalogue;

/// An error of a function of NCCL.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NcclError {
    /// The function.
    pub call: &'static str,
    /// NCCL's number of the error.
    pub code: i32,
    /// NCCL's description of the code.
    pub text: String,
    /// The message that NCCL logged with the error; empty if it logged none.
    pub last: String,
}

impl NcclError {
    /// Returns the remedy.
    pub fn remedy(&self) -> &'static str {
        // The logged message is more specific than the code.
        catalogue::remedy(&self.last)
            .or_else(|| catalogue::remedy(self.name()))
            .unwrap_or("run with NCCL_DEBUG=INFO to see what NCCL does")
    }

    /// Returns NCCL's name of the code.
    pub fn name(&self) -> &'static str {
        match self.code {
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            _ => "unknown to this program",
        }
    }
}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with NCCL error {} ({}): {}", self.call, self.code, self.name(), self.text)?;
        if !self.last.is_empty() {
            write!(f, " [{}]", self.last)?;
        }
        write!(f, "; {}", self.remedy())
    }
}

impl std::error::Error for NcclError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_code_words_last_words_and_a_remedy() {
        let mut error = NcclError {
            call: "ncclAllReduce",
            code: 2,
            text: "unhandled system error".into(),
            last: "Error: failed to extend /dev/shm/nccl-x to 4 MB".into(),
        };
        let text = error.to_string();
        for word in [
            "ncclAllReduce",
            "error 2",
            "ncclSystemError",
            "unhandled system",
            "failed to extend",
            "--shm-size",
        ] {
            assert!(text.contains(word), "`{word}` is not in: {text}");
        }
        (error.code, error.last) = (5, "Mismatched NCCL version detected : rank 0 version 22803".into());
        assert!(error.to_string().contains("exactly the same NCCL everywhere"), "{error}");
        (error.code, error.last) = (2, String::new());
        assert!(error.to_string().contains("NCCL_DEBUG=WARN"));
    }
}
