//! Messages that NCCL writes with `NCCL_DEBUG=WARN`, and its codes.

use super::Source::Documented;
use super::{Entry, Source};

const RUNTIME: Source = Documented(
    "https://github.com/NVIDIA/nccl/blob/master/docs/userguide/source/troubleshooting/runtime_and_mpi_issues.rst",
);
const NETWORK: Source = Documented(
    "https://github.com/NVIDIA/nccl/blob/master/docs/userguide/source/troubleshooting/networking_troubleshooting.rst",
);
const INIT: Source = Documented("https://github.com/NVIDIA/nccl/blob/v2.27.3-1/src/init.cc");
const BOOTSTRAP: Source = Documented("https://github.com/NVIDIA/nccl/blob/v2.27.3-1/src/bootstrap.cc");
const TYPES: Source = Documented("https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html");

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        id: "nccl-duplicate-gpu",
        patterns: &["duplicate gpu detected"],
        sample: "node0:29880:30398 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000",
        source: INIT,
        cause: "two ranks of one host use the same GPU",
        remedy: "start one rank a GPU: at most as many ranks on a host as CUDA_VISIBLE_DEVICES shows, each with its own LOCAL_RANK, or with one GPU of its own in CUDA_VISIBLE_DEVICES",
        is_plain: false,
    },
    Entry {
        id: "nccl-versions-differ",
        patterns: &[
            "mismatched nccl version detected",
            "lets only ranks of exactly the same version together",
        ],
        sample: "node1:411:411 [0] init.cc:1100 NCCL WARN Mismatched NCCL version detected : rank 0 version 22803 rank 1 version 22807",
        source: INIT,
        cause: "the hosts, or the ranks' container images, have different versions of NCCL, and even the last number must match",
        remedy: "install exactly the same NCCL everywhere, or set device.nccl; on each host, `ryz doctor` shows which library it \
                 finds, and where",
        is_plain: false,
    },
    Entry {
        id: "shared-memory-too-small",
        patterns: &[
            "failed to extend /dev/shm",
            "error while creating shared memory segment",
            "failed to create shared memory file",
            "posix_fallocate failed",
            "insufficient shared memory (shm)",
        ],
        sample: "node0:97:176 [0] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-03v824 to 4194660 bytes",
        source: RUNTIME,
        cause: "/dev/shm is full; a container has 64 MB by default, which a few GPUs exhaust",
        remedy: "give the container more: --shm-size=8g or --ipc=host, in Kubernetes an emptyDir of medium Memory at /dev/shm; \
                 remove what dead jobs left: /dev/shm/nccl-*",
        is_plain: false,
    },
    Entry {
        id: "shared-memory-removed",
        patterns: &[
            "error while attaching to shared memory segment",
            "unlink shared memory * failed*no such file",
        ],
        sample: "node0:14937:69361 [0] misc/shmutils.cc:129 NCCL WARN Error while attaching to shared memory segment \
                 /dev/shm/nccl-glnlGK (size 14156128), error: No such file or directory (2)",
        source: RUNTIME,
        cause: "the segment is gone or was never visible: systemd removes files of users who are not logged in, or the ranks of \
                one host run in containers with different /dev/shm",
        remedy: "set RemoveIPC=no in /etc/systemd/logind.conf and restart systemd-logind; start the containers with --ipc=host",
        is_plain: false,
    },
    Entry {
        id: "nccl-no-interface",
        patterns: &[
            "no socket interface found",
            "no usable listening interface found",
            "no interface found starting with",
            "is neither af_inet(2) nor af_inet6(10)",
        ],
        sample: "node0:12:12 [0] bootstrap.cc:110 NCCL WARN Bootstrap : no socket interface found",
        source: BOOTSTRAP,
        cause: "NCCL_SOCKET_IFNAME names an interface that this host does not have, or no interface is \
                up and has an address",
        remedy: "list the interfaces with `ip -br address`, and name one that every host has, or unset the variable",
        is_plain: false,
    },
    Entry {
        id: "nccl-peer-gone",
        patterns: &[
            "connect to *<*>*connection refused",
            "connection closed by remote peer",
            "socket recv failed while polling",
            "recv from *<*> failed",
        ],
        sample: "node0:39964:40044 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer node1<57557>",
        source: Documented("https://github.com/NVIDIA/nccl/blob/v2.27.3-1/src/misc/socket.cc"),
        cause: "the other rank's process has ended, and this error is only an echo of it",
        remedy: "look at the first error in the other ranks' logs, or in the launcher's closing report",
        is_plain: false,
    },
    Entry {
        id: "nccl-unreachable",
        patterns: &[
            "connect to *<*>*no route to host",
            "connect to *<*>*timed out",
            "connect to *<*>*network is unreachable",
            "connect to *<*>*software caused connection abort",
        ],
        sample: "node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No \
                 route to host) errno 115(Operation now in progress)",
        source: NETWORK,
        cause: "NCCL announced an address that the other host cannot reach: the wrong interface (a container bridge, a veth), or \
                a firewall that blocks high ports",
        remedy: "name the interface between the hosts in NCCL_SOCKET_IFNAME, and open the ports of \
                 net.ipv4.ip_local_port_range between the hosts",
        is_plain: false,
    },
    Entry {
        id: "nccl-calls-differ",
        patterns: &[
            "message truncated : received",
            "collective mismatch error",
            "mismatched collective detected",
        ],
        sample: "node1:1307367:1307586 [0] transport/net_ib.cc:1038 NCCL WARN NET/IB : req 0/1 tag 0 peer 10.0.0.6<58683> \
                 collective mismatch error, local size 496640 remote size 65536",
        source: Documented("https://github.com/NVIDIA/nccl/issues/969"),
        cause: "ranks called different operations or sizes, or NCCL_ variables differ between them",
        remedy: "compare the ranks' calls, with `ryz trace` where they are ours, and the NCCL_ variables of all hosts",
        is_plain: false,
    },
    Entry {
        id: "nccl-nvls",
        patterns: &["nvls.cc*nccl warn cuda failure"],
        sample: "node0:12098:12141 [2] transport/nvls.cc:244 NCCL WARN Cuda failure 1 'invalid argument'",
        source: Documented("https://github.com/NVIDIA/nccl/issues/1488"),
        cause: "NVLink multicast (NVLS) does not work on this machine: most often, the fabric manager was restarted while GPUs \
                were in use",
        remedy: "reset the GPUs or restart the host; until then, run with NCCL_NVLS_ENABLE=0",
        is_plain: false,
    },
    Entry {
        id: "nccl-no-peer-access",
        patterns: &[
            "could not enable p2p",
            "failed to peer with device",
            "peer access is not supported between these two devices",
        ],
        sample: "node0:12:12 [0] NCCL INFO Could not enable P2P between dev 0(=5000) and dev 1(=8000)",
        source: Documented(
            "https://github.com/NVIDIA/nccl/blob/master/docs/userguide/source/troubleshooting/gpu_troubleshooting.rst",
        ),
        cause: "these GPUs cannot read each other's memory, so data goes through the host: different PCIe root ports, an IOMMU \
                or PCIe ACS, a virtual machine, or a GPU whose driver forbids it",
        remedy: "see `nvidia-smi topo -m` and `nvidia-smi topo -p2p p`; on bare metal, turn ACS and the IOMMU off in the BIOS",
        is_plain: false,
    },
];

/// Entries for a bare code: they apply when NCCL has written no message.
pub(super) const CODES: &[Entry] = &[
    Entry {
        id: "nccl-cuda-error",
        patterns: &["ncclunhandledcudaerror", "unhandled cuda error"],
        sample: "ncclAllReduce failed with NCCL error 1 (ncclUnhandledCudaError): unhandled cuda error",
        source: TYPES,
        cause: "a call of CUDA within NCCL failed",
        remedy: "run with NCCL_DEBUG=WARN to see which; see `nvidia-smi`, and the kernel log for Xid messages",
        is_plain: false,
    },
    Entry {
        id: "nccl-system-error",
        patterns: &["ncclsystemerror", "unhandled system error"],
        sample: "ncclCommInitRank failed with NCCL error 2 (ncclSystemError): unhandled system error",
        source: TYPES,
        cause: "the operating system refused NCCL something, often shared memory, a socket or a file limit",
        remedy: "run with NCCL_DEBUG=WARN to see which",
        is_plain: false,
    },
    Entry {
        id: "nccl-internal-error",
        patterns: &["ncclinternalerror", "please report this issue to the nccl developers"],
        sample: "Test NCCL failure common.cu:958 'internal error - please report this issue to the NCCL developers / '",
        source: TYPES,
        cause: "a check inside NCCL failed, often behind another error of NCCL on this or another rank",
        remedy: "run with NCCL_DEBUG=WARN, and try another version of NCCL through device.nccl",
        is_plain: false,
    },
    Entry {
        id: "nccl-invalid-call",
        patterns: &["ncclinvalidargument", "ncclinvalidusage"],
        sample: "ncclAllReduce failed with NCCL error 4 (ncclInvalidArgument): invalid argument",
        source: TYPES,
        cause: "NCCL was called in a way it forbids",
        remedy: "run with NCCL_DEBUG=WARN to see how; in a call of ours, this is a defect of this program, please report it",
        is_plain: false,
    },
    Entry {
        id: "nccl-remote-error",
        patterns: &["ncclremoteerror", "remote process exited or there was a network error"],
        sample: "NCCL error 6 (ncclRemoteError): remote process exited or there was a network error",
        source: TYPES,
        cause: "another rank ended or cannot be reached",
        remedy: "look at the first error in the other ranks' logs, or in the launcher's closing report",
        is_plain: false,
    },
];
