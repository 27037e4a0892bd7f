//! `[layout]`

use super::section;
use std::num::NonZeroU32;

section! {
    /// The degrees of parallelism. The product of the three is the world size.
    LayoutConfig = "layout" {
        /// Number of ranks that share each layer; unset, the world size divided by the other two.
        tensor_parallel: Option<NonZeroU32> = "",
        /// Number of stages that the layers are divided into.
        pipeline_parallel: NonZeroU32 = "1",
        /// Number of replicas of the model.
        data_parallel: NonZeroU32 = "1",
    }
}
