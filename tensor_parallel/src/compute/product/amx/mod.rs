//! Intel's AMX: eight tiles of 16 rows of 64 bytes, and products of tiles of bf16.

mod product;
mod tiles;

use std::arch::asm;
use std::sync::OnceLock;

pub(super) use self::product::{GRANULE, Packed, multiply};
#[cfg(test)]
pub(in crate::compute) use self::tiles::tests::Plain;
pub(in crate::compute) use self::tiles::{DEPTH, Rows, SIDE, Tile, TileProducts, Tiles, pack};

/// Number of the tiles among the state components that a process must request, and the system call (`ARCH_REQ_XCOMP_PERM`).
const TILE_DATA: usize = 18;
const REQUEST: usize = 0x1023;

/// Returns true if the processor has tiles and the system allows this process to use them.
pub(super) fn is_allowed() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| has_tiles() && is_granted())
}

fn has_tiles() -> bool {
    const TILES_AND_BF16: u32 = 1 << 24 | 1 << 22;
    let leaves = std::arch::x86_64::__cpuid(0).eax;
    leaves >= 7 && std::arch::x86_64::__cpuid_count(7, 0).edx & TILES_AND_BF16 == TILES_AND_BF16
}

#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "a system call without a wrapper")]
fn is_granted() -> bool {
    const ARCH_PRCTL: isize = 158;
    let result: isize;
    // SAFETY: the call takes two numbers and touches no memory. The kernel overwrites rcx and r11.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") REQUEST, in("rsi") TILE_DATA,
            out("rcx") _, out("r11") _, options(nostack, nomem));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_granted() -> bool {
    false
}
