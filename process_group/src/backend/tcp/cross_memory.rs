//! Reading a peer's memory where it lies: one copy, made by the kernel, where a socket takes two.
//!
//! Linux calls it cross-memory attach. It works between processes of one user on one host, unless a security module or a
//! container forbids it; so nothing is believed that has not been tried.

use std::io::IoSliceMut;

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::wire::hello::{End, Nonce, Place};

/// A nonce that stays where it is, for the other end to find.
pub(super) struct Beacon {
    nonce: Box<Nonce>,
    shown: bool,
}

impl Beacon {
    /// `shown`: whether to tell others where it lies.
    pub(super) fn new(nonce: Nonce, shown: bool) -> Self {
        Self { nonce: Box::new(nonce), shown }
    }

    pub(super) fn end(&self) -> End {
        let place = if self.shown {
            Place { pid: std::process::id(), address: address(&self.nonce[..]) }
        } else {
            Place::default()
        };
        End { nonce: *self.nonce, place }
    }
}

/// Where a slice begins, for another process.
pub(super) fn address(bytes: &[u8]) -> u64 {
    // Exposed, since whoever reads it does not go through this process's pointers.
    bytes.as_ptr().expose_provenance() as u64
}

/// The process whose memory can be read, if it can: because what it says lies there does.
pub(super) fn probe(end: &End) -> Option<u32> {
    if end.place == Place::default() {
        return None;
    }
    let mut seen = Nonce::default();
    read(end.place.pid, end.place.address, &mut seen).ok()?;
    (seen == end.nonce).then_some(end.place.pid)
}

/// Copies from the memory of process `pid`, at `from`, all that `into` holds.
pub(super) fn read(pid: u32, from: u64, into: &mut [u8]) -> nix::Result<()> {
    let mut done = 0;
    while done < into.len() {
        let left = into.len() - done;
        let remote = RemoteIoVec { base: from as usize + done, len: left };
        match process_vm_readv(
            Pid::from_raw(pid as i32),
            &mut [IoSliceMut::new(&mut into[done..])],
            &[remote],
        ) {
            Ok(0) => return Err(nix::Error::EFAULT),
            Ok(bytes) => done += bytes,
            Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_finds_its_own_beacon_and_no_other() {
        let beacon = Beacon::new([5; 32], true);
        assert_eq!(probe(&beacon.end()), Some(std::process::id()));
        let lie = End { nonce: [6; 32], ..beacon.end() };
        assert_eq!(probe(&lie), None);
        assert_eq!(probe(&Beacon::new([5; 32], false).end()), None);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        assert!(read(std::process::id(), 8, &mut [0; 16]).is_err());
        let mut none: [u8; 0] = [];
        assert!(read(std::process::id(), 8, &mut none).is_ok());
    }
}
