//! `[layout]`

use super::section;
use std::num::NonZeroU32;

section! {
    /// How the ranks of the world are divided among the kinds of parallelism; the product is the world size.
    LayoutConfig = "layout" {
        /// Ranks that share each layer; unset, all that the other two leave.
        tensor_parallel: Option<NonZeroU32> = "",
        /// Stages that layers are divided into.
        pipeline_parallel: NonZeroU32 = "1",
        /// Copies of the model.
        data_parallel: NonZeroU32 = "1",
    }
}
