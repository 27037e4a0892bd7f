//! `[nccl]`

use super::section;
use crate::{
    Ctas, GidIndex, IbTimeout, NcclAlgorithm, NcclBuffer, NcclCrossNic, NcclDebug, NcclGdrLevel,
    NcclP2pLevel, NcclProfile, NcclProtocol, NcclSubsystems, NcclThreads,
};
use std::path::PathBuf;

section! {
    /// Settings for NCCL, passed in its own variables before it is loaded. A `NCCL_…` variable that the user has set overrides
    /// everything here; a field overrides the profile; NCCL chooses what is unset.
    NcclConfig = "nccl" {
        /// A named set of settings.
        profile: NcclProfile = "none",
        /// How much NCCL logs: `NCCL_DEBUG`.
        debug: Option<NcclDebug> = "",
        /// Which parts of NCCL log: `NCCL_DEBUG_SUBSYS`.
        debug_subsystems: Option<NcclSubsystems> = "",
        /// The file that NCCL logs to; `%h` is the host, `%p` the process id: `NCCL_DEBUG_FILE`.
        debug_file: Option<PathBuf> = "",
        /// The all-reduce algorithm: `NCCL_ALGO`. For debugging, not for speed.
        algorithm: Option<NcclAlgorithm> = "",
        /// The protocol that moves bytes: `NCCL_PROTO`. For debugging, not for speed.
        protocol: Option<NcclProtocol> = "",
        /// The minimum number of thread blocks of a collective: `NCCL_MIN_CTAS`.
        min_ctas: Option<Ctas> = "",
        /// The maximum number of thread blocks of a collective; each occupies a multiprocessor: `NCCL_MAX_CTAS`.
        max_ctas: Option<Ctas> = "",
        /// The number of threads in each thread block: `NCCL_NTHREADS`.
        threads: Option<NcclThreads> = "",
        /// The size of each buffer between two GPUs; there is one for each channel and neighbour: `NCCL_BUFFSIZE`.
        buffer_size: Option<NcclBuffer> = "",
        /// The longest path over which GPUs access each other's memory: `NCCL_P2P_LEVEL`.
        p2p_level: Option<NcclP2pLevel> = "",
        /// The longest path between adapter and GPU over which GPUDirect RDMA is used: `NCCL_NET_GDR_LEVEL`.
        gpu_direct_level: Option<NcclGdrLevel> = "",
        /// Whether processes of one host may share host memory: `NCCL_SHM_DISABLE`, inverted.
        shared_memory: Option<bool> = "",
        /// Whether InfiniBand and RoCE may be used: `NCCL_IB_DISABLE`, inverted.
        infiniband: Option<bool> = "",
        /// The InfiniBand adapters to use, such as `mlx5_0,mlx5_1`: `NCCL_IB_HCA`.
        infiniband_devices: Option<String> = "",
        /// The entry of the adapters' tables of global identifiers that RoCE uses; unset, NCCL 2.21 and newer finds the one of RoCE v2, and older versions take 0: `NCCL_IB_GID_INDEX`.
        ib_gid_index: Option<GidIndex> = "",
        /// How long an adapter waits for an acknowledgement, n in 4.096 µs × 2ⁿ; more helps on very large networks: `NCCL_IB_TIMEOUT`.
        ib_timeout: Option<IbTimeout> = "",
        /// Whether a ring or tree may leave a node through one adapter and enter the next through another: `NCCL_CROSS_NIC`.
        cross_nic: Option<NcclCrossNic> = "",
        /// The network interfaces to use, by prefix, or `=eth0` for exactly that one: `NCCL_SOCKET_IFNAME`.
        socket_interface: Option<String> = "",
        /// Whether operations of several communicators run in the order in which the host launched them, which prevents
        /// deadlocks: `NCCL_LAUNCH_ORDER_IMPLICIT`, since NCCL 2.26.
        launch_order: Option<bool> = "",
        /// Whether a communicator may be used inside and outside CUDA graphs at the same time; if not, each launch is cheaper: `NCCL_GRAPH_MIXING_SUPPORT`.
        graph_mixing: Option<bool> = "",
        /// A file that describes the machine, read before NCCL looks at the hardware: `NCCL_TOPO_FILE`.
        topology_file: Option<PathBuf> = "",
        /// The plug-in that chooses algorithm and protocol of each call: the file of a library, or what follows `libnccl-tuner-` in its name. Its code runs in every rank: `NCCL_TUNER_PLUGIN`.
        tuner_plugin: Option<String> = "",
    }
}
