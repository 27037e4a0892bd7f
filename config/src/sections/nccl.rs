//! `[nccl]`

use super::section;
use crate::{NcclEnv, NcclProfile};

section! {
    /// Settings for NCCL, passed in its own variables before it is loaded. A `NCCL_…` variable that the user has set overrides
    /// everything here; `env` overrides the profile; NCCL chooses values that are unset.
    NcclConfig = "nccl" {
        /// A named set of variables.
        profile: NcclProfile = "none",
        /// NCCL's own variables, passed on as they are. In the file, the table `[nccl.env]`.
        env: NcclEnv = "",
    }
}
