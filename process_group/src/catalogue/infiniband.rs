//! Messages of NCCL and UCX about InfiniBand and RoCE.

use super::Source::Documented;
use super::{Entry, Source};

const NETWORK: Source = Documented(
    "https://github.com/NVIDIA/nccl/blob/master/docs/userguide/source/troubleshooting/networking_troubleshooting.rst",
);
const VERBS: Source = Documented("https://github.com/NVIDIA/nccl/blob/v2.27.3-1/src/misc/ibvwrap.cc");

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        id: "infiniband-locked-memory",
        patterns: &[
            "ibv_create_qp*failed",
            "ibv_reg_mr*failed",
            "ibv_reg_dmabuf_mr*cannot allocate memory",
            "ibv_create_cq*failed",
            "please set max locked memory",
        ],
        sample: "node0:27:27 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        source: NETWORK,
        cause: "InfiniBand registers its buffers as locked memory, and this process may lock too little",
        remedy: "lift the limit where ranks start: `ulimit -l unlimited`, memlock in /etc/security/limits.conf, LimitMEMLOCK of \
                 Slurm's daemon, or --ulimit memlock=-1 for a container; check with `ulimit -l` within the job",
        is_plain: false,
    },
    Entry {
        id: "roce-address-index",
        patterns: &["ibv_modify_qp failed*invalid argument"],
        sample: "node0:27:27 [0] misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Invalid argument",
        source: NETWORK,
        cause: "on RoCE, NCCL uses the wrong index of the NIC's address table (GID)",
        remedy: "with NCCL 2.21 or newer, unset NCCL_IB_GID_INDEX; with an older one, set it to the index of the RoCE v2 address \
                 that `show_gids` prints",
        is_plain: false,
    },
    Entry {
        id: "infiniband-unreachable",
        patterns: &["ibv_modify_qp failed*timed out", "ibv_modify_qp failed*network is unreachable"],
        sample: "node0:12:12 [5] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev \
                 mlx5_4:1, curr state INIT, next state RTR",
        source: Documented("https://github.com/NVIDIA/nccl/issues/2013"),
        cause: "two NICs cannot reach each other, although the hosts can: rails that are not connected, or wrong routes",
        remedy: "test the two devices with `ib_write_bw -d`; where only NICs of the same number are connected, set \
                 NCCL_CROSS_NIC=0; leave the others out with NCCL_IB_HCA",
        is_plain: false,
    },
    Entry {
        id: "infiniband-no-answer",
        patterns: &["got completion*status=12", "got completion*with error 12", "ibv_wc_retry_exc_err"],
        sample: "node0:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.0.0.6<54862> with status=12 \
                 opcode=0 len=0 vendor err 129 (Recv)",
        source: Documented("https://github.com/NVIDIA/nccl/issues/426"),
        cause: "the other NIC did not acknowledge in time: its rank has died, its link is down, or packets get lost; right after \
                the start, the NICs cannot talk to each other at all",
        remedy: "look for a rank that failed first; then test the pair with `ib_write_bw -d`, and see `ibstat` and, on RoCE, the \
                 counters of `ethtool -S`",
        is_plain: false,
    },
    Entry {
        id: "infiniband-port-down",
        patterns: &["got async event : port error", "async fatal event", "got async event : port_err"],
        sample: "node0:12:99 [0] p2p_plugin.c:141 NCCL WARN NET/IB : Got async event : port error",
        source: Documented("https://github.com/NVIDIA/nccl/blob/v2.27.3-1/src/transport/net_ib.cc"),
        cause: "a port of the NIC went down while the job ran: a cable, a transceiver, a switch",
        remedy: "see `ibstat` and the kernel log; leave the device out with NCCL_IB_HCA, such as ^mlx5_4, until it is repaired",
        is_plain: false,
    },
    Entry {
        id: "infiniband-no-device-file",
        patterns: &["ibv_open_device failed"],
        sample: "node0:12:12 [0] misc/ibvwrap.cc:119 NCCL WARN Call to ibv_open_device failed",
        source: VERBS,
        cause: "the process sees the NIC and may not open it: a container without /dev/infiniband",
        remedy: "start the container with --device=/dev/infiniband, or use the device plugin of Kubernetes",
        is_plain: false,
    },
    Entry {
        id: "infiniband-no-library",
        patterns: &["failed to open libibverbs"],
        sample: "node0:14605:14673 [0] NCCL INFO Failed to open libibverbs.so[.1]",
        source: Documented("https://github.com/pytorch/pytorch/issues/68893"),
        cause: "libibverbs is not installed here or in the container, so NCCL uses TCP between hosts, which is much slower than \
                InfiniBand",
        remedy: "install rdma-core (libibverbs1, ibverbs-providers) if the host has InfiniBand; otherwise nothing is wrong",
        is_plain: false,
    },
];
