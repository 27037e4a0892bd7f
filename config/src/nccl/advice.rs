//! What is to be said of a variable that NCCL does not read, or should not find.

use super::known::KNOWN;
use crate::keys::nearest;

/// Something to know about a variable that begins as NCCL's do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// What the variable is, or was.
    pub what: String,
    /// What to do instead.
    pub instead: String,
}

/// Name, what it is, what to do instead.
const TABLE: &[(&str, &str, &str)] = &[
    (
        "NCCL_MIN_NRINGS",
        "the name that NCCL_MIN_NCHANNELS had before NCCL 2.5, accepted still",
        "set nccl.min_ctas, or NCCL_MIN_CTAS",
    ),
    (
        "NCCL_MAX_NRINGS",
        "the name that NCCL_MAX_NCHANNELS had before NCCL 2.5, accepted still",
        "set nccl.max_ctas, or NCCL_MAX_CTAS",
    ),
    ("NCCL_RINGS", "rings written by hand, removed in NCCL 2.5", "unset it: NCCL finds the rings itself"),
    (
        "NCCL_NVLINK_DISABLE",
        "never a variable of NCCL; nothing reads it",
        "set nccl.p2p_level: `nvl` restricts GPUs to NVLink, `loc` keeps them from each other's memory",
    ),
    (
        "NCCL_TIMEOUT",
        "never a variable of NCCL, which waits without bound; nothing reads it",
        "set process_group.timeout, the deadline of every collective",
    ),
    (
        "NCCL_LL_THRESHOLD",
        "removed in NCCL 2.5, which chooses the protocol by its own model",
        "unset it, or set nccl.protocol",
    ),
    (
        "NCCL_TREE_THRESHOLD",
        "removed in NCCL 2.5, which chooses the algorithm by its own model",
        "unset it, or set nccl.algorithm",
    ),
    ("NCCL_SINGLE_RING_THRESHOLD", "removed in NCCL 2.3", "unset it, or set nccl.max_ctas"),
    (
        "NCCL_IB_GDR_LEVEL",
        "the name that NCCL_NET_GDR_LEVEL had before NCCL 2.4",
        "set nccl.gpu_direct_level, or NCCL_NET_GDR_LEVEL",
    ),
    ("NCCL_IB_CUDA_SUPPORT", "removed in NCCL 2.4", "set nccl.gpu_direct_level, or NCCL_NET_GDR_LEVEL"),
    (
        "NCCL_CHECKS_DISABLE",
        "replaced in NCCL 2.2.12; arguments are checked always",
        "unset it; NCCL_CHECK_POINTERS=1 checks pointers too",
    ),
    (
        "NCCL_DEBUG_LOG_DIR",
        "never a variable of NCCL; nothing reads it",
        "set nccl.debug_file, or NCCL_DEBUG_FILE",
    ),
    (
        "NCCL_ASYNC_ERROR_HANDLING",
        "PyTorch's, and not NCCL's; it is called TORCH_NCCL_ASYNC_ERROR_HANDLING now",
        "unset it: errors are always watched here, and the deadline is process_group.timeout",
    ),
    (
        "NCCL_BLOCKING_WAIT",
        "PyTorch's, and not NCCL's; it is called TORCH_NCCL_BLOCKING_WAIT now",
        "unset it: the deadline of a collective is process_group.timeout",
    ),
    (
        "NCCL_DESYNC_DEBUG",
        "PyTorch's, and not NCCL's; it is called TORCH_NCCL_DESYNC_DEBUG now",
        "unset it: at a deadline the rank that is missing is named here",
    ),
    (
        "NCCL_COMM_BLOCKING",
        "overrules whether communicators block, which is chosen here for each: 1 takes the deadline from making a \
         communicator, 0 makes every call cost ten times as much",
        "unset it",
    ),
    (
        "NCCL_COMM_SPLIT_SHARE_RESOURCES",
        "overrules which communicators share their end, which is chosen here: 0 takes from a call that is stuck inside NCCL \
         what gets it out",
        "unset it",
    ),
    (
        "NCCL_COMM_ID",
        "the address at which processes without a launcher meet; it stands in for the id that ranks exchange here, so that \
         groups which should be separate would meet in one place",
        "unset it",
    ),
];

/// What to know about this variable; none if NCCL knows it and nothing speaks against it.
///
/// ```
/// let advice = ryzanstein_config::nccl::advice("NCCL_TIMEOUT").unwrap();
/// assert!(advice.instead.contains("process_group.timeout"));
/// assert_eq!(ryzanstein_config::nccl::advice("NCCL_DEBUG"), None);
/// ```
pub fn advice(name: &str) -> Option<Advice> {
    if let Some((_, what, instead)) = TABLE.iter().find(|(known, ..)| *known == name) {
        return Some(Advice { what: (*what).into(), instead: (*instead).into() });
    }
    if KNOWN.binary_search(&name).is_ok() {
        return None;
    }
    let near = nearest(name, KNOWN.iter().map(|&known| known.to_owned()));
    let instead = match near {
        Some(near) => format!("did you mean {near}? Otherwise unset it, unless a plug-in of NCCL reads it"),
        None => "unset it, unless a plug-in of NCCL reads it".into(),
    };
    Some(Advice { what: "no variable of NCCL from 2.18 to 2.32".into(), instead })
}
