//! `[layout]`

use super::section;
use std::num::NonZeroU32;

section! {
    /// How the ranks are divided among the kinds of parallelism. The product of the three is the world size.
    LayoutConfig = "layout" {
        /// Ranks that share each layer; unset, the world size divided by the other two.
        tensor_parallel: Option<NonZeroU32> = "",
        /// Stages that the layers are divided into.
        pipeline_parallel: NonZeroU32 = "1",
        /// Replicas of the model.
        data_parallel: NonZeroU32 = "1",
    }
}
