//! Who made the processor.

use std::sync::LazyLock;

/// The maker of a processor, where what is fastest depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessorMaker {
    /// AMD.
    Amd,
    /// Intel.
    Intel,
    /// Another, or an architecture that does not tell.
    Other,
}

/// The maker of this machine's processor.
pub fn processor_maker() -> ProcessorMaker {
    // In a virtual machine, asking takes long.
    static MAKER: LazyLock<ProcessorMaker> = LazyLock::new(ask);
    *MAKER
}

#[cfg(target_arch = "x86_64")]
fn ask() -> ProcessorMaker {
    let leaf = std::arch::x86_64::__cpuid(0);
    match [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() {
        b"AuthenticAMD" => ProcessorMaker::Amd,
        b"GenuineIntel" => ProcessorMaker::Intel,
        _ => ProcessorMaker::Other,
    }
}

#[cfg(not(target_arch = "x86_64"))]
const fn ask() -> ProcessorMaker {
    ProcessorMaker::Other
}
