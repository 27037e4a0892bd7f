//! Reading a peer's memory: one copy, made by the kernel, where a socket takes two.
//!
//! Linux calls it cross-memory attach. It works between processes of one user on one host, unless a security module or a
//! container forbids it. So a process counts as readable only after something has been read from it.

use std::io::IoSliceMut;
use std::thread;

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::wire::hello::{MemoryToken, Nonce};

/// A random token at a fixed address, for the other ends of links to read.
#[derive(Debug)]
pub(super) struct MemoryProbe {
    token: Box<Nonce>,
}

impl MemoryProbe {
    pub(super) fn new(token: Nonce) -> Self {
        Self { token: Box::new(token) }
    }

    /// It lies there as long as the probe lives.
    pub(super) fn token(&self) -> MemoryToken {
        let address = address(&self.token[..]);
        MemoryToken { pid: std::process::id(), address, token: *self.token }
    }
}

/// Where a slice begins, for another process.
pub(crate) fn address(bytes: &[u8]) -> u64 {
    // Exposed, since whoever reads it does not go through this process's pointers.
    bytes.as_ptr().expose_provenance() as u64
}

/// A process whose memory this one can read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReadableProcess(u32);

impl ReadableProcess {
    /// The process at the other end of a link, if its token can be read where it says.
    pub(super) fn probe(memory: &MemoryToken) -> Option<Self> {
        if *memory == MemoryToken::default() {
            return None;
        }
        let mut seen = Nonce::default();
        let process = Self(memory.pid);
        process.read(memory.address, &mut seen).ok()?;
        (seen == memory.token).then_some(process)
    }

    /// Fills `into` with what lies at `from` in that process.
    ///
    /// # Errors
    /// Those of the system: `ESRCH` for a process that has ended, `EFAULT` for an address where nothing is.
    pub(crate) fn read(self, from: u64, into: &mut [u8]) -> nix::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let left = into.len() - done;
            let remote = RemoteIoVec { base: from as usize + done, len: left };
            match process_vm_readv(
                Pid::from_raw(self.0 as i32),
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

    /// The same by two threads, each of which reads one half.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub(crate) fn read_by_two(self, from: u64, into: &mut [u8]) -> nix::Result<()> {
        let (first, second) = into.split_at_mut(into.len() / 2);
        let middle = from + first.len() as u64;
        let by_another = thread::scope(|scope| {
            let another = thread::Builder::new()
                .name("ryz-read".into())
                .spawn_scoped(scope, || self.read(middle, second));
            self.read(from, first)?;
            Ok(another.ok().map(|another| another.join().expect("reading does not panic")))
        })?;
        // Where no thread could be started, this one reads both.
        by_another.unwrap_or_else(|| self.read(middle, second))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_finds_its_own_probe_and_no_other() {
        let probe = MemoryProbe::new([5; 32]);
        assert_eq!(ReadableProcess::probe(&probe.token()), Some(ReadableProcess(std::process::id())));
        let lie = MemoryToken { token: [6; 32], ..probe.token() };
        assert_eq!(ReadableProcess::probe(&lie), None);
        assert_eq!(ReadableProcess::probe(&MemoryToken::default()), None);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let own = ReadableProcess(std::process::id());
        assert!(own.read(8, &mut [0; 16]).is_err());
        let mut none: [u8; 0] = [];
        assert!(own.read(8, &mut none).is_ok());
    }

    #[test]
    fn two_threads_read_what_one_reads() {
        let own = ReadableProcess(std::process::id());
        for length in [0, 1, 2, 4097, 100_001] {
            let there: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            let mut here = vec![255; length];
            own.read_by_two(address(&there), &mut here).unwrap();
            assert!(here == there, "{length} bytes");
        }
        assert!(own.read_by_two(8, &mut [0; 16]).is_err());
    }
}
