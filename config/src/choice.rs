//! Settings with a few named values.

use crate::keys::nearest;
use crate::setting::{Setting, public_setting};

macro_rules! choice {
    (
        $(#[$meta:meta])+
        $name:ident, $expected:literal, $example:literal {
            $( $(#[$variant_meta:meta])+ $variant:ident = $text:literal $(or $alias:literal)*, )+
        }
    ) => {
        $(#[$meta])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $( $(#[$variant_meta])+ $variant, )+
        }

        impl $name {
            /// All choices.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the name of the choice in the configuration.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl Setting for $name {
            const EXPECTED: &'static str = $expected;
            const EXAMPLE: &'static str = $example;

            fn read(text: &str) -> Result<Self, Option<String>> {
                match text.trim() {
                    $( $text $(| $alias)* => Ok(Self::$variant), )+
                    other => Err(nearest(other, Self::ALL.iter().map(|choice| choice.name().to_owned()))
                        .map(|near| format!("did you mean `{near}`?"))),
                }
            }

            fn show(&self) -> String {
                self.name().to_owned()
            }
        }

        public_setting!($name);
    };
}

choice! {
    /// The implementation of the collectives.
    BackendChoice, "one of auto, nccl, tcp (or gloo)", "auto" {
        /// NCCL if every rank has a GPU and the library; otherwise `tcp`.
        Auto = "auto",
        /// NVIDIA's library, between GPUs.
        Nccl = "nccl",
        /// Collectives between CPUs, through shared memory and sockets. `gloo`, the name of such a backend in other frameworks,
        /// is an alias.
        Tcp = "tcp" or "gloo",
    }
}

choice! {
    /// The processors of the ranks that `ryz launch` starts.
    BindChoice, "one of auto, none", "none" {
        /// Each rank gets processors of its own if there are enough.
        Auto = "auto",
        /// The ranks share the launcher's processors.
        None = "none",
    }
}

choice! {
    /// The encryption of connections.
    EncryptionChoice, "one of auto, on, off", "on" {
        /// Encrypts all connections except those to loopback addresses and through Unix sockets.
        Auto = "auto",
        /// Encrypts all connections.
        On = "on",
        /// Encrypts no connections.
        Off = "off",
    }
}

choice! {
    /// The launcher whose variables give the rank and the job of a process that `ryz launch` did not start.
    LauncherChoice, "one of auto, torchrun, slurm, open_mpi, pmi, pmix, leader_worker_set, kubeflow, indexed_job", "slurm" {
        /// Any launcher that has set variables; launchers that contradict each other are an error.
        Auto = "auto",
        /// torchrun, or anything else that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
        Torchrun = "torchrun",
        /// Slurm's `srun`.
        Slurm = "slurm",
        /// Open MPI's `mpirun`.
        OpenMpi = "open_mpi" or "openmpi",
        /// PMI, as set by the `mpiexec` of MPICH and Intel MPI.
        Pmi = "pmi",
        /// PMIx, which gives only the rank.
        Pmix = "pmix",
        /// A LeaderWorkerSet of Kubernetes.
        LeaderWorkerSet = "leader_worker_set",
        /// Kubeflow's trainer.
        Kubeflow = "kubeflow",
        /// An indexed Job of Kubernetes, which gives only the rank.
        IndexedJob = "indexed_job",
    }
}

choice! {
    /// The format of log lines.
    LogFormat, "one of text, json", "text" {
        /// Text for people.
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}

choice! {
    /// The instruction sets of matrix products on CPUs, the fastest first.
    InstructionSet, "one of amx, avx512_bf16, avx512, avx2, neon, scalar", "avx2" {
        /// AMX: tiles of bf16 (Intel, from Sapphire Rapids on), which treat subnormal values as zero. Other types use AVX-512.
        Amx = "amx",
        /// AVX-512 dot products of bf16, in vectors of 512 bits, which treat subnormal values as zero. Other types use AVX-512.
        Avx512Bf16 = "avx512_bf16",
        /// Vectors of 512 bits.
        Avx512 = "avx512",
        /// Vectors of 256 bits with fused multiply-add.
        Avx2 = "avx2",
        /// Vectors of 128 bits on ARM.
        Neon = "neon",
        /// Instructions that every processor of the architecture has.
        Scalar = "scalar",
    }
}

choice! {
    /// The order in which a model adds numbers.
    Numerics, "one of fast, invariant", "invariant" {
        /// Any order: the same bits on all ranks of a job, but other bits with another number of ranks.
        Fast = "fast",
        /// One order, a fixed tree: the logits of a token depend only on the weights, the tokens before it, and the instruction set
        /// of the CPU or the architecture of the GPU.
        Invariant = "invariant",
    }
}

choice! {
    /// The type of a model's weights in memory.
    ModelDType, "one of f32, f16, bf16", "bf16" {
        /// IEEE single precision.
        F32 = "f32" or "float32" or "float",
        /// IEEE half precision.
        F16 = "f16" or "float16" or "half",
        /// bfloat16: the range of f32 in 16 bits.
        Bf16 = "bf16" or "bfloat16",
    }
}

choice! {
    /// A named set of NCCL's variables.
    NcclProfile, "one of none, inference, bandwidth, debug", "inference" {
        /// Sets no variables. NCCL chooses.
        None = "none",
        /// Few thread blocks, which leave the multiprocessors to concurrent compute; NCCL logs warnings.
        Inference = "inference",
        /// As many thread blocks as NCCL allows, for large messages without concurrent compute; NCCL logs warnings.
        Bandwidth = "bandwidth",
        /// NCCL logs its detection and its choices, and checks pointers.
        Debug = "debug",
    }
}
