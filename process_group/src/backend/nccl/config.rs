//! The settings that a communicator is made with.

use std::ffi::{c_char, c_void};

use super::communicator::Kind;

/// `ncclConfig_t` of NCCL 2.18, the oldest accepted: newer ones take the part they are given and keep their defaults for
/// the rest.
#[repr(C)]
pub(super) struct CommConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    min_ctas: i32,
    max_ctas: i32,
    net_name: *const c_char,
    split_share: i32,
}

impl CommConfig {
    /// What it does not say is NCCL's choice.
    pub(super) const fn new(kind: Kind) -> Self {
        const UNSET: i32 = i32::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: matches!(kind, Kind::Launch) as i32,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: std::ptr::null(),
            // Of a communicator with what is split off it.
            split_share: matches!(kind, Kind::Abort) as i32,
        }
    }

    pub(super) fn pointer(&mut self) -> *mut c_void {
        std::ptr::from_mut(self).cast()
    }
}
