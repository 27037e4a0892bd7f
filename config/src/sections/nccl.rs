//! `[nccl]`

use super::section;
use crate::{
    Ctas, NcclAlgorithm, NcclBuffer, NcclDebug, NcclGdrLevel, NcclP2pLevel, NcclProfile, NcclProtocol,
    NcclSubsystems,
};
use std::path::PathBuf;

section! {
    /// What NCCL is told, through its own variables, before it is loaded. A `NCCL_…` variable that the user has set is
    /// stronger than anything here; a field is stronger than the profile; what is unset is NCCL's own choice.
    NcclConfig = "nccl" {
        /// Settings that go together.
        profile: NcclProfile = "none",
        /// How much NCCL logs: `NCCL_DEBUG`.
        debug: Option<NcclDebug> = "",
        /// Which parts of NCCL log: `NCCL_DEBUG_SUBSYS`.
        debug_subsystems: Option<NcclSubsystems> = "",
        /// The file that NCCL logs to, with `%h` for the host and `%p` for the process: `NCCL_DEBUG_FILE`.
        debug_file: Option<PathBuf> = "",
        /// How an all-reduce goes: `NCCL_ALGO`. To be set for finding faults, not for speed.
        algorithm: Option<NcclAlgorithm> = "",
        /// How bytes are moved: `NCCL_PROTO`. To be set for finding faults, not for speed.
        protocol: Option<NcclProtocol> = "",
        /// The least number of thread blocks of a collective: `NCCL_MIN_CTAS`.
        min_ctas: Option<Ctas> = "",
        /// The greatest number of thread blocks of a collective, each of which occupies a multiprocessor: `NCCL_MAX_CTAS`.
        max_ctas: Option<Ctas> = "",
        /// The size of the buffer between two GPUs, of which there is one for each channel and neighbour: `NCCL_BUFFSIZE`.
        buffer_size: Option<NcclBuffer> = "",
        /// The longest way over which GPUs reach each other's memory: `NCCL_P2P_LEVEL`.
        p2p_level: Option<NcclP2pLevel> = "",
        /// The longest way between adapter and GPU over which GPUDirect RDMA is used: `NCCL_NET_GDR_LEVEL`.
        gpu_direct_level: Option<NcclGdrLevel> = "",
        /// Whether host memory may be shared between processes of one host: `NCCL_SHM_DISABLE`, the other way round.
        shared_memory: Option<bool> = "",
        /// Whether InfiniBand and RoCE may be used: `NCCL_IB_DISABLE`, the other way round.
        infiniband: Option<bool> = "",
        /// The InfiniBand adapters to use, as in `mlx5_0,mlx5_1`: `NCCL_IB_HCA`.
        infiniband_devices: Option<String> = "",
        /// The network interfaces to use, by prefix, or `=eth0` for exactly that one: `NCCL_SOCKET_IFNAME`.
        socket_interface: Option<String> = "",
        /// Whether operations of several communicators run in the order in which the host launched them, which keeps
        /// them from deadlocking: `NCCL_LAUNCH_ORDER_IMPLICIT`, from NCCL 2.26 on.
        launch_order: Option<bool> = "",
        /// Whether one communicator may be used inside and outside of CUDA graphs at the same time; if not, each launch
        /// is cheaper: `NCCL_GRAPH_MIXING_SUPPORT`.
        graph_mixing: Option<bool> = "",
    }
}
