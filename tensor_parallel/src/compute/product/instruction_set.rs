//! Which instructions of the processor multiply matrices.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use pulp::Arch;

use super::amx;

/// The instructions that products and attention on a processor use. All ranks of a model use the same, as sums are not in the
/// same order in all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InstructionSet {
    /// Tiles of bf16 (Intel, from Sapphire Rapids on). Everything but bf16 is AVX-512's.
    Amx,
    /// Dot products of bf16 in vectors of 512 bits. Everything but bf16 is AVX-512's.
    Avx512Bf16,
    /// Vectors of 512 bits.
    Avx512,
    /// Vectors of 256 bits with fused multiply-add.
    Avx2,
    /// Vectors of 128 bits on ARM.
    Neon,
    /// What every processor of its architecture has.
    Scalar,
}

/// This processor lacks an instruction set, or there is none of this name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("instruction set {name}: {why}")]
pub struct UnsupportedInstructionSet {
    name: String,
    why: String,
}

fn names(sets: &[InstructionSet]) -> String {
    sets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

static CHOSEN: OnceLock<InstructionSet> = OnceLock::new();

impl InstructionSet {
    const ALL: [Self; 6] = [Self::Amx, Self::Avx512Bf16, Self::Avx512, Self::Avx2, Self::Neon, Self::Scalar];

    /// Those that this processor has and the system allows, the fastest first. The last one every processor has.
    pub fn supported() -> Vec<Self> {
        Self::ALL.into_iter().filter(|set| set.is_supported()).collect()
    }

    /// The one that this process uses: the one chosen, otherwise the fastest.
    pub fn current() -> Self {
        *CHOSEN.get_or_init(|| Self::supported()[0])
    }

    /// Chooses the one that this process uses, before the first use.
    ///
    /// # Errors
    /// When this processor lacks it, or this process already uses another.
    pub fn choose(self) -> Result<(), UnsupportedInstructionSet> {
        let refused = |why| UnsupportedInstructionSet { name: self.to_string(), why };
        if !self.is_supported() {
            let expected = names(&Self::supported());
            return Err(refused(format!(
                "this processor lacks it, or the system does not allow it; expected one of {expected}"
            )));
        }
        match *CHOSEN.get_or_init(|| self) {
            chosen if chosen == self => Ok(()),
            chosen => Err(refused(format!(
                "this process already computes with {chosen}, which cannot change while it runs"
            ))),
        }
    }

    pub(super) fn is_supported(self) -> bool {
        match self {
            Self::Amx => Self::Avx512Bf16.is_supported() && amx::is_allowed(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                Self::Avx512.is_supported()
                    && std::arch::is_x86_feature_detected!("avx512bf16")
                    && std::arch::is_x86_feature_detected!("avx512bw")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => pulp::x86::V4::try_new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => pulp::x86::V3::try_new().is_some(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => pulp::aarch64::Neon::try_new().is_some(),
            Self::Scalar => true,
            #[allow(unreachable_patterns, reason = "those of other architectures")]
            _ => false,
        }
    }

    /// For what is not bf16.
    pub(super) fn arch(self) -> Arch {
        #[allow(unused_mut, reason = "on other architectures")]
        let mut arch = Arch::Scalar;
        #[cfg(target_arch = "x86_64")]
        if let (Self::Avx2, Some(simd)) = (self, pulp::x86::V3::try_new()) {
            arch = Arch::V3(simd);
        } else if self != Self::Scalar {
            arch = Arch::new();
        }
        #[cfg(target_arch = "aarch64")]
        if self != Self::Scalar {
            arch = Arch::new();
        }
        arch
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Amx => "amx",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Neon => "neon",
            Self::Scalar => "scalar",
        })
    }
}

impl FromStr for InstructionSet {
    type Err = UnsupportedInstructionSet;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|set| set.to_string() == name);
        known.ok_or_else(|| {
            let why = format!("there is none of this name; expected one of {}", names(&Self::ALL));
            UnsupportedInstructionSet { name: name.into(), why }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_others_refused_with_those_that_there_are() {
        for set in InstructionSet::ALL {
            assert_eq!(set.to_string().parse(), Ok(set));
        }
        let error = "sse9".parse::<InstructionSet>().unwrap_err().to_string();
        assert!(error.contains("sse9") && error.contains("scalar"), "{error}");
    }

    #[test]
    fn what_a_processor_lacks_is_refused() {
        let supported = InstructionSet::supported();
        assert_eq!(supported.last(), Some(&InstructionSet::Scalar));
        for set in InstructionSet::ALL.into_iter().filter(|set| !supported.contains(set)) {
            assert!(set.choose().unwrap_err().to_string().contains("lacks"));
        }
    }
}
