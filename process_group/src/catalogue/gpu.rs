//! CUDA's errors, by their names in the driver's interface and by the words that the run-time library, NCCL and frameworks
//! print; NVML; the kernel log.

use super::Source::Documented;
use super::{Entry, Source};

const CUDA: Source = Documented("https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html");
const XID: Source = Documented("https://docs.nvidia.com/deploy/xid-errors/index.html");

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        id: "gpu-off-the-bus",
        patterns: &["gpu has fallen off the bus", "nvrm: xid*): 79,"],
        sample: "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.",
        source: XID,
        cause: "the driver cannot reach the GPU any more: overheating, power, the slot, or the GPU itself",
        remedy: "drain the host, restart it, and have the hardware examined if it happens again",
        is_plain: false,
    },
    Entry {
        id: "gpu-hardware",
        patterns: &[
            "cuda_error_ecc_uncorrectable",
            "cuda_error_nvlink_uncorrectable",
            "cuda_error_contained",
            "uncorrectable ecc error encountered",
            "uncorrectable nvlink error detected",
        ],
        sample: "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        source: CUDA,
        cause: "the GPU's memory or its NVLink reports a hardware fault",
        remedy: "see `nvidia-smi -q` and the kernel log for Xid messages; reset the GPU, and replace it if the count grows",
        is_plain: false,
    },
    Entry {
        id: "gpu-memory-full",
        patterns: &["cuda_error_out_of_memory", "cuda*out of memory", "cublas_status_alloc_failed"],
        sample: "cuMemAlloc_v2 failed on GPU 0 with CUDA error 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory",
        source: CUDA,
        cause: "the GPU is full: of this program, or of another one on the same GPU",
        remedy: "end what else runs on the GPU (`nvidia-smi` names it), lower device.memory_fraction, or use more GPUs",
        is_plain: false,
    },
    Entry {
        id: "gpu-not-visible",
        patterns: &[
            "cuda_error_no_device",
            "no cuda-capable device is detected",
            "no cuda gpus are available",
        ],
        sample: "cuInit failed on GPU 0 with CUDA error 100 (CUDA_ERROR_NO_DEVICE): no CUDA-capable device is detected",
        source: CUDA,
        cause: "this process sees no GPU: CUDA_VISIBLE_DEVICES is empty or wrong, or the container was started without GPUs",
        remedy: "compare `nvidia-smi -L` with CUDA_VISIBLE_DEVICES; start the container with --gpus all",
        is_plain: false,
    },
    Entry {
        id: "gpu-busy",
        patterns: &["cuda_error_device_unavailable", "cuda-capable device(s) is/are busy or unavailable"],
        sample: "cuDevicePrimaryCtxRetain failed on GPU 0 with CUDA error 46 (CUDA_ERROR_DEVICE_UNAVAILABLE): CUDA-capable \
                 device(s) is/are busy or unavailable",
        source: CUDA,
        cause: "another process holds the GPU in exclusive mode, or two ranks use one GPU in that mode",
        remedy: "see the mode with `nvidia-smi -q -d COMPUTE`, and who is there with `nvidia-smi`; start one rank a GPU",
        is_plain: false,
    },
    Entry {
        id: "fabric-manager",
        patterns: &["cuda_error_system_not_ready", "system not yet initialized"],
        sample: "cuInit failed on GPU 0 with CUDA error 802 (CUDA_ERROR_SYSTEM_NOT_READY): system not yet initialized",
        source: CUDA,
        cause: "a machine with NVSwitch has no running fabric manager, or one of another version than the driver",
        remedy: "start it: systemctl start nvidia-fabricmanager; after an update of the driver, install the same version of it",
        is_plain: false,
    },
    Entry {
        id: "driver-too-old",
        patterns: &[
            "driver version is insufficient",
            "cuda_error_system_driver_mismatch",
            "cuda_error_compat_not_supported_on_device",
            "forward compatibility was attempted on non supported hw",
        ],
        sample: "NCCL WARN Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'",
        source: CUDA,
        cause: "a library, often NCCL, was built for a newer CUDA than the driver supports, or the driver's files do not match",
        remedy: "update the driver and restart the host, or install an NCCL for the driver's CUDA (`nvidia-smi` shows it) and set \
                 device.nccl",
        is_plain: false,
    },
    Entry {
        id: "driver-updated",
        patterns: &["driver/library version mismatch"],
        sample: "Failed to initialize NVML: Driver/library version mismatch",
        source: Documented("https://github.com/NVIDIA/ubuntu-packaging-nvidia-driver/issues/3"),
        cause: "the driver's packages were updated while the old kernel module is still loaded",
        remedy: "restart the host; in a container, restart it too",
        is_plain: false,
    },
    Entry {
        id: "kernel-not-for-this-gpu",
        patterns: &[
            "cuda_error_no_binary_for_gpu",
            "cuda_error_invalid_image",
            "cuda_error_invalid_ptx",
            "cuda_error_unsupported_ptx_version",
            "no kernel image is available",
            "compiled with an unsupported toolchain",
        ],
        sample: "NCCL WARN Cuda failure 'no kernel image is available for execution on the device'",
        source: CUDA,
        cause: "a kernel was not built for this GPU or driver: an old NCCL on a new GPU, or a stale cache of our own kernels",
        remedy: "install a newer NCCL and set device.nccl; for a kernel of ours, delete the folder device.kernel_cache or update \
                 the driver",
        is_plain: false,
    },
    Entry {
        id: "kernel-went-astray",
        patterns: &[
            "cuda_error_illegal_address",
            "cuda_error_misaligned_address",
            "cuda_error_invalid_address_space",
            "cuda_error_launch_failed",
            "an illegal memory access was encountered",
            "unspecified launch failure",
        ],
        sample: "cuStreamSynchronize failed on GPU 0 with CUDA error 700 (CUDA_ERROR_ILLEGAL_ADDRESS): an illegal memory access \
                 was encountered",
        source: CUDA,
        cause: "a kernel used memory that is not its own, most often one that ran before the call that reports it; the GPU's \
                context is lost",
        remedy: "end this process; find the kernel by running again under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1",
        is_plain: false,
    },
    Entry {
        id: "gpu-after-fork",
        patterns: &[
            "cuda_error_not_initialized",
            "cuda_error_deinitialized",
            "cuda failure*'initialization error'",
        ],
        sample: "node0:2918:4483 [4] init.cc:263 NCCL WARN Cuda failure 'initialization error'",
        source: Documented("https://github.com/NVIDIA/nccl/issues/1029"),
        cause: "this process is ending, or was forked from one that had used CUDA before",
        remedy: "use CUDA in one process only: start ranks as new processes (in Python, the method spawn), before CUDA is used",
        is_plain: false,
    },
    Entry {
        id: "stream-is-captured",
        patterns: &[
            "cuda_error_stream_capture",
            "cuda_error_captured_event",
            "operation not permitted when stream is capturing",
        ],
        sample: "cuMemAlloc_v2 failed on GPU 0 with CUDA error 900 (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED): operation not \
                 permitted when stream is capturing",
        source: CUDA,
        cause: "the stream is being captured into a graph, which this operation does not allow",
        remedy: "allocate, synchronise and load before the capture: run what is captured once without it",
        is_plain: false,
    },
];
