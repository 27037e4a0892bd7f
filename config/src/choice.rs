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
        #[non_exhaustive]
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
