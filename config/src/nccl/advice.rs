//! Advice about variables that NCCL does not read, or that are harmful.

use super::known::KNOWN;
use crate::keys::nearest;

/// Advice about a variable whose name begins with `NCCL_`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The nature of the variable, or its former purpose.
    pub what: String,
    /// The recommended action instead.
    pub instead: String,
}

/// Name, description, recommended action.
const TABLE: &[(&str, &str, &str)] = &[
    (
        "NCCL_MIN_NRINGS",
        "the name of NCCL_MIN_NCHANNELS before NCCL 2.5, still accepted",
        "set NCCL_MIN_CTAS",
    ),
    (
        "NCCL_MAX_NRINGS",
        "the name of NCCL_MAX_NCHANNELS before NCCL 2.5, still accepted",
        "set NCCL_MAX_CTAS",
    ),
    ("NCCL_RINGS", "rings written by hand; removed in NCCL 2.5", "unset it: NCCL finds the rings itself"),
    (
        "NCCL_NVLINK_DISABLE",
        "never a variable of NCCL; nothing reads it",
        "set NCCL_P2P_LEVEL: NVL allows peer access over NVLink only, LOC not at all",
    ),
    (
        "NCCL_TIMEOUT",
        "never a variable of NCCL, which waits for ever; nothing reads it",
        "set process_group.timeout, the deadline of every collective",
    ),
    (
        "NCCL_LL_THRESHOLD",
        "removed in NCCL 2.5, which chooses the protocol by its own model",
        "unset it, or set NCCL_PROTO",
    ),
    (
        "NCCL_TREE_THRESHOLD",
        "removed in NCCL 2.5, which chooses the algorithm by its own model",
        "unset it, or set NCCL_ALGO",
    ),
    ("NCCL_SINGLE_RING_THRESHOLD", "removed in NCCL 2.3", "unset it, or set NCCL_MAX_CTAS"),
    ("NCCL_IB_GDR_LEVEL", "the name of NCCL_NET_GDR_LEVEL before NCCL 2.4", "set NCCL_NET_GDR_LEVEL"),
    ("NCCL_IB_CUDA_SUPPORT", "removed in NCCL 2.4", "set NCCL_NET_GDR_LEVEL"),
    (
        "NCCL_CHECKS_DISABLE",
        "replaced in NCCL 2.2.12; arguments are always checked",
        "unset it; NCCL_CHECK_POINTERS=1 checks pointers too",
    ),
    ("NCCL_DEBUG_LOG_DIR", "never a variable of NCCL; nothing reads it", "set NCCL_DEBUG_FILE"),
    (
        "NCCL_ASYNC_ERROR_HANDLING",
        "PyTorch's, not NCCL's; now called TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "unset it: errors are always watched for, and the deadline is process_group.timeout",
    ),
    (
        "NCCL_BLOCKING_WAIT",
        "PyTorch's, not NCCL's; now called TORCH_NCCL_BLOCKING_WAIT",
        "unset it: the deadline of a collective is process_group.timeout",
    ),
    (
        "NCCL_DESYNC_DEBUG",
        "PyTorch's, not NCCL's; now called TORCH_NCCL_DESYNC_DEBUG",
        "unset it: the error at a deadline always names the missing rank",
    ),
    (
        "NCCL_COMM_BLOCKING",
        "overrides whether communicators block, which Ryzanstein sets for each: with 1, creating a communicator has no \
         deadline; with 0, every call costs ten times as much",
        "unset it",
    ),
    (
        "NCCL_COMM_SPLIT_SHARE_RESOURCES",
        "overrides which communicators share resources, which Ryzanstein sets: with 0, a call that is stuck inside NCCL \
         cannot be aborted",
        "unset it",
    ),
    (
        "NCCL_COMM_ID",
        "the bootstrap address of processes without a launcher; it replaces the id that ranks exchange, so separate groups \
         would connect to each other",
        "unset it",
    ),
];

/// Returns advice about a variable that is known to be unread or harmful.
pub(super) fn retired(name: &str) -> Option<Advice> {
    let (_, what, instead) = TABLE.iter().find(|(known, ..)| *known == name)?;
    Some(Advice { what: (*what).into(), instead: (*instead).into() })
}

/// The version of NCCL in NVIDIA's container images, which set this variable. Nothing reads it, and users of the images cannot be
/// asked to unset it.
const STATED_VERSION: &str = "NCCL_VERSION";

/// Returns advice about a variable, or `None` if the variable is harmless: NCCL reads it, or NVIDIA's images set it.
///
/// ```
/// let advice = ryzanstein_config::nccl::advice("NCCL_TIMEOUT").unwrap();
/// assert!(advice.instead.contains("process_group.timeout"));
/// assert_eq!(ryzanstein_config::nccl::advice("NCCL_DEBUG"), None);
/// ```
pub fn advice(name: &str) -> Option<Advice> {
    if let Some(advice) = retired(name) {
        return Some(advice);
    }
    if name == STATED_VERSION || KNOWN.binary_search(&name).is_ok() {
        return None;
    }
    let near = nearest(name, KNOWN.iter().map(|&known| known.to_owned()));
    let instead = match near {
        Some(near) => format!("did you mean {near}? Otherwise unset it, unless an NCCL plug-in reads it"),
        None => "unset it, unless an NCCL plug-in reads it".into(),
    };
    Some(Advice { what: "not a variable of NCCL 2.18 to 2.32".into(), instead })
}
