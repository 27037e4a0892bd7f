//! Settings with a few named values.

use crate::keys::nearest;
use crate::setting::{Setting, public_setting};

macro_rules! choice {
    (
        $(#[$meta:meta])+
        $name:ident, $expected:literal, $example:literal {
            $( $(#[$variant_meta:meta])+ $variant:ident = $text:literal $(or $alias:literal)?, )+
        }
    ) => {
        $(#[$meta])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $( $(#[$variant_meta])+ $variant, )+
        }

        impl $name {
            /// Every choice there is.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The name a user writes.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl Setting for $name {
            const EXPECTED: &'static str = $expected;
            const EXAMPLE: &'static str = $example;

            fn read(text: &str) -> Result<Self, Option<String>> {
                match text.trim() {
                    $( $text $(| $alias)? => Ok(Self::$variant), )+
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
    BackendChoice, "one of auto, nccl, tcp (or gloo), loopback", "auto" {
        /// NCCL where every rank has a GPU and the library; otherwise `tcp`, or loopback between threads.
        Auto = "auto",
        /// NVIDIA's library, between GPUs.
        Nccl = "nccl",
        /// Between CPUs, through shared memory and sockets. `gloo`, the name of such a backend in other frameworks, means the same.
        Tcp = "tcp" or "gloo",
        /// Ranks that are threads of one process.
        Loopback = "loopback",
    }
}

choice! {
    /// The algorithm of an all-reduce on CPUs. If all ranks are on one host, any but `auto` keeps links on sockets.
    AlgorithmChoice, "one of auto, ring, recursive_doubling, halving_doubling, direct, hierarchical", "auto" {
        /// The cheapest for each message, by the cost model.
        Auto = "auto",
        /// Reduce-scatter, then all-gather, around the ring.
        Ring = "ring",
        /// Full vectors exchanged with partners at distances that double.
        RecursiveDoubling = "recursive_doubling",
        /// Reduce-scatter by halving, then all-gather by doubling.
        HalvingDoubling = "halving_doubling",
        /// Every rank sends to every other.
        Direct = "direct",
        /// Within each host, between the hosts, within each host again. Where the ranks are on several hosts.
        Hierarchical = "hierarchical",
    }
}

choice! {
    /// Whether connections are encrypted.
    EncryptionChoice, "one of auto, on, off", "on" {
        /// All but those to loopback addresses and through Unix sockets.
        Auto = "auto",
        /// All.
        On = "on",
        /// None.
        Off = "off",
    }
}

choice! {
    /// Whose variables say which rank of which job a process is, where `ryz launch` did not start it.
    LauncherChoice, "one of auto, torchrun, slurm, open_mpi, pmi, pmix, leader_worker_set, kubeflow, indexed_job", "slurm" {
        /// Whoever has set variables; launchers that contradict each other are an error.
        Auto = "auto",
        /// torchrun, or anything else that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
        Torchrun = "torchrun",
        /// Slurm's `srun`.
        Slurm = "slurm",
        /// Open MPI's `mpirun`.
        OpenMpi = "open_mpi" or "openmpi",
        /// PMI, as MPICH's and Intel MPI's `mpiexec` set it.
        Pmi = "pmi",
        /// PMIx, which tells the rank alone.
        Pmix = "pmix",
        /// A LeaderWorkerSet of Kubernetes.
        LeaderWorkerSet = "leader_worker_set",
        /// Kubeflow's trainer.
        Kubeflow = "kubeflow",
        /// An indexed Job of Kubernetes, which tells the rank alone.
        IndexedJob = "indexed_job",
    }
}

choice! {
    /// The format of log lines.
    LogFormat, "one of text, json", "text" {
        /// For people.
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}

choice! {
    /// The instructions that multiply matrices on a processor, the fastest first.
    InstructionSet, "one of amx, avx512_bf16, avx512, avx2, neon, scalar", "avx2" {
        /// Tiles of bf16 (Intel, from Sapphire Rapids on), which count subnormal values as zero. Everything but bf16 is AVX-512's.
        Amx = "amx",
        /// Dot products of bf16 in vectors of 512 bits, which count subnormal values as zero. Everything but bf16 is AVX-512's.
        Avx512Bf16 = "avx512_bf16",
        /// Vectors of 512 bits.
        Avx512 = "avx512",
        /// Vectors of 256 bits with fused multiply-add.
        Avx2 = "avx2",
        /// Vectors of 128 bits on ARM.
        Neon = "neon",
        /// What every processor of its architecture has.
        Scalar = "scalar",
    }
}

choice! {
    /// The type in which a model's weights are held.
    ModelDType, "one of f32, f16, bf16", "bf16" {
        /// IEEE single precision.
        F32 = "f32",
        /// IEEE half precision.
        F16 = "f16",
        /// bfloat16: the range of f32 in half the bits.
        Bf16 = "bf16",
    }
}

choice! {
    /// A named set of NCCL's variables.
    NcclProfile, "one of none, inference, bandwidth, debug", "inference" {
        /// None: NCCL decides by itself.
        None = "none",
        /// Few thread blocks, so that concurrent compute keeps the multiprocessors; warnings are logged.
        Inference = "inference",
        /// As many thread blocks as NCCL allows, for large messages without concurrent compute; warnings are logged.
        Bandwidth = "bandwidth",
        /// NCCL logs what it found and chose, and checks pointers.
        Debug = "debug",
    }
}
