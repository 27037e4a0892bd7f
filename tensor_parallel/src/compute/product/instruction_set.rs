//! The instruction set of matrix products. All ranks of a model use the same, because the order of sums differs between
//! instruction sets.

use std::sync::OnceLock;

use pulp::Arch;
use ryzanstein_config::InstructionSet;

#[cfg(target_arch = "x86_64")]
use super::amx;

/// An instruction set that this processor lacks, or that differs from the one that the process already uses.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{set}: {why}")]
pub struct UnsupportedInstructionSet {
    set: InstructionSet,
    why: String,
}

static CHOSEN: OnceLock<InstructionSet> = OnceLock::new();

/// Returns the sets that this processor has and the system allows, the fastest first. Every processor has the last one.
pub fn supported() -> Vec<InstructionSet> {
    InstructionSet::ALL.iter().copied().filter(|set| is_supported(*set)).collect()
}

/// Returns the set that this process uses: the chosen one, otherwise the fastest.
pub fn current() -> InstructionSet {
    *CHOSEN.get_or_init(|| supported()[0])
}

/// Chooses the set that this process uses. Must be called before the first use.
///
/// # Errors
/// Returns an error if this processor lacks the set, or if this process already uses another.
pub fn choose(set: InstructionSet) -> Result<(), UnsupportedInstructionSet> {
    let refused = |why| UnsupportedInstructionSet { set, why };
    if !is_supported(set) {
        let expected: Vec<_> = supported().iter().map(ToString::to_string).collect();
        let expected = expected.join(", ");
        return Err(refused(format!(
            "this processor lacks it, or the system does not allow it; expected one of {expected}"
        )));
    }
    match *CHOSEN.get_or_init(|| set) {
        chosen if chosen == set => Ok(()),
        chosen => Err(refused(format!(
            "this process already computes with {chosen}, which cannot change while it runs"
        ))),
    }
}

pub(in crate::compute) fn is_supported(set: InstructionSet) -> bool {
    match set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Amx => is_supported(InstructionSet::Avx512Bf16) && amx::is_allowed(),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Bf16 => {
            is_supported(InstructionSet::Avx512)
                && std::arch::is_x86_feature_detected!("avx512bf16")
                && std::arch::is_x86_feature_detected!("avx512bw")
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => pulp::x86::V4::try_new().is_some(),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => pulp::x86::V3::try_new().is_some(),
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon => pulp::aarch64::Neon::try_new().is_some(),
        InstructionSet::Scalar => true,
        #[allow(unreachable_patterns, reason = "those of other architectures")]
        _ => false,
    }
}

/// Returns the architecture for types other than bf16.
pub(super) fn arch(set: InstructionSet) -> Arch {
    #[allow(unused_mut, reason = "on other architectures")]
    let mut arch = Arch::Scalar;
    #[cfg(target_arch = "x86_64")]
    if let (InstructionSet::Avx2, Some(simd)) = (set, pulp::x86::V3::try_new()) {
        arch = Arch::V3(simd);
    } else if set != InstructionSet::Scalar {
        arch = Arch::new();
    }
    #[cfg(target_arch = "aarch64")]
    if set != InstructionSet::Scalar {
        arch = Arch::new();
    }
    arch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_processor_lacks_is_refused() {
        let supported = supported();
        assert_eq!(supported.last(), Some(&InstructionSet::Scalar));
        for set in InstructionSet::ALL.iter().filter(|set| !supported.contains(set)) {
            assert!(choose(*set).unwrap_err().to_string().contains("lacks"));
        }
    }
}
