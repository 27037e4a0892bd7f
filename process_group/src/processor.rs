//! Which processor this is.

use std::sync::LazyLock;

/// What tells processors apart, where what is fastest depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Processor {
    /// Who made it.
    pub maker: ProcessorMaker,
    /// Its family, as its maker counts them: 25 is AMD's Zen 3 and Zen 4, 26 Zen 5. 0 where the architecture does not tell.
    pub family: u32,
}

/// The maker of a processor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessorMaker {
    /// AMD.
    Amd,
    /// Intel.
    Intel,
    /// Another, or an architecture that does not tell.
    Other,
}

/// This machine's processor.
pub fn processor() -> Processor {
    // In a virtual machine, asking takes long.
    static PROCESSOR: LazyLock<Processor> = LazyLock::new(ask);
    *PROCESSOR
}

#[cfg(target_arch = "x86_64")]
fn ask() -> Processor {
    use std::arch::x86_64::__cpuid;

    let leaf = __cpuid(0);
    let maker = match [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() {
        b"AuthenticAMD" => ProcessorMaker::Amd,
        b"GenuineIntel" => ProcessorMaker::Intel,
        _ => ProcessorMaker::Other,
    };
    let signature = __cpuid(1).eax;
    let family = signature >> 8 & 0xF;
    Processor { maker, family: if family == 0xF { family + (signature >> 20 & 0xFF) } else { family } }
}

#[cfg(not(target_arch = "x86_64"))]
const fn ask() -> Processor {
    Processor { maker: ProcessorMaker::Other, family: 0 }
}
