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
    /// Which implementation carries the collectives.
    BackendChoice, "one of auto, nccl, tcp (or gloo), loopback", "auto" {
        /// NCCL where every rank has a GPU and the library is there, TCP elsewhere.
        Auto = "auto",
        /// NVIDIA's library, between GPUs.
        Nccl = "nccl",
        /// Sockets, between CPUs. `gloo`, what other frameworks call such a backend, means the same.
        Tcp = "tcp" or "gloo",
        /// Ranks that are threads of one process.
        Loopback = "loopback",
    }
}

choice! {
    /// How an all-reduce over TCP goes.
    AlgorithmChoice, "one of auto, ring, recursive_doubling, halving_doubling, direct", "auto" {
        /// The cheapest by the cost model, for each message.
        Auto = "auto",
        /// Reduce-scatter, then all-gather, around the ring.
        Ring = "ring",
        /// Full vectors exchanged with partners at distances that double.
        RecursiveDoubling = "recursive_doubling",
        /// Reduce-scatter by halving, then all-gather by doubling.
        HalvingDoubling = "halving_doubling",
        /// Every rank sends to every other.
        Direct = "direct",
    }
}

choice! {
    /// How log lines look.
    LogFormat, "one of text, json", "text" {
        /// For people.
        Text = "text",
        /// One object a line.
        Json = "json",
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
    /// Settings of NCCL that go together.
    NcclProfile, "one of none, inference, bandwidth, debug", "inference" {
        /// None: NCCL decides by itself.
        None = "none",
        /// Few thread blocks, so that compute beside it keeps the multiprocessors; warnings are logged.
        Inference = "inference",
        /// As many thread blocks as NCCL takes, for large messages that nothing overlaps; warnings are logged.
        Bandwidth = "bandwidth",
        /// What NCCL found and chose is logged, and pointers are checked.
        Debug = "debug",
    }
}

choice! {
    /// How much NCCL logs.
    NcclDebug, "one of version, warn, info, trace", "warn" {
        /// Its version, once.
        Version = "version",
        /// What went wrong.
        Warn = "warn",
        /// What it found and chose, too.
        Info = "info",
        /// Every call, in builds of NCCL that have it.
        Trace = "trace",
    }
}

choice! {
    /// How NCCL's all-reduce goes. Others, the ones on multicast among them, are NCCL's own to choose.
    NcclAlgorithm, "one of ring, tree", "ring" {
        /// Around the ring.
        Ring = "ring",
        /// Up and down a tree; the operations that have none go around the ring. Needs NCCL 2.24.
        Tree = "tree",
    }
}

choice! {
    /// How NCCL moves bytes. `LL128` is not offered: forced where the hardware lacks what it relies on, it corrupts data
    /// silently, and NCCL takes it by itself where it is safe.
    NcclProtocol, "one of ll, simple", "simple" {
        /// A flag beside each word: low latency, half the bandwidth.
        Ll = "ll",
        /// Whole pieces with fences: full bandwidth, higher latency.
        Simple = "simple",
    }
}

choice! {
    /// The longest way between two GPUs over which NCCL lets them reach each other's memory.
    NcclP2pLevel, "one of loc, nvl, pix, pxb, phb, sys", "nvl" {
        /// Never.
        Never = "loc",
        /// NVLink.
        Nvlink = "nvl",
        /// One PCI switch.
        Switch = "pix",
        /// Several PCI switches.
        Switches = "pxb",
        /// The processor of one NUMA node.
        Node = "phb",
        /// Between NUMA nodes.
        System = "sys",
    }
}

choice! {
    /// The longest way between a network adapter and a GPU over which NCCL uses GPUDirect RDMA.
    NcclGdrLevel, "one of loc, pix, pxb, phb, sys", "pxb" {
        /// Never.
        Never = "loc",
        /// One PCI switch.
        Switch = "pix",
        /// Several PCI switches.
        Switches = "pxb",
        /// The processor of one NUMA node.
        Node = "phb",
        /// Between NUMA nodes.
        System = "sys",
    }
}
