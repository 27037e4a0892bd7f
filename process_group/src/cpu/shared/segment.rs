//! A block of memory that two processes have mapped. Only this module accesses it.
//!
//! `unsafe` rests on these facts:
//!
//! - The mapping is as long as `Segment::len` says until it is dropped, and no process can remove its pages: the file is sealed
//!   against shrinking, and [`open`](Segment::open) rejects one that is not.
//! - Every access is checked against `len` and its alignment first, and panics otherwise: offsets are this process's own.
//! - The process with the other mapping may write at any time. So nothing here makes a `&[u8]` of the memory: bytes are copied out
//!   and in, and words are atomic. A peer that writes out of turn makes the copied bytes wrong, and nothing else.
#![allow(
    unsafe_code,
    reason = "memory that other processes write; the module says what each access rests on"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create, open,
    readlink,
};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// The name of the memory in the system's lists of mappings and descriptors.
const NAME: &str = "ryz-shared";

/// Memory of this process or of another, mapped here.
#[derive(Debug)]
pub(super) struct Segment {
    map: MmapRaw,
}

/// Keeps the descriptor of a segment open until the peers have opened it too.
#[derive(Debug)]
pub(super) struct SegmentFd(OwnedFd);

impl SegmentFd {
    /// Returns the number of the descriptor in this process.
    pub(super) fn number(&self) -> u32 {
        self.0.as_raw_fd() as u32
    }
}

impl Segment {
    /// Creates a zeroed segment of this process, which only the descriptor makes accessible.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn create(len: usize) -> io::Result<(Self, SegmentFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Systems may require that memory cannot be executed. Kernels before Linux 6.3 do not know the flag.
        let file =
            memfd_create(NAME, flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| memfd_create(NAME, flags))?;
        // Beyond this limit, the system does not only refuse: its signal ends the process.
        if getrlimit(Resource::Fsize).current.is_some_and(|most| (len as u64) > most) {
            return Err(Errno::FBIG.into());
        }
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        Ok((Self { map }, SegmentFd(file)))
    }

    /// Maps the segment of another process's descriptor. Keeps no descriptor.
    ///
    /// # Errors
    /// Those of the system, and one if the descriptor is not a sealed file of this length.
    pub(super) fn open(pid: u32, descriptor: u32, len: usize) -> io::Result<Self> {
        let file = File::from(open_in(pid, descriptor, &format!("/memfd:{NAME}"))?);
        let is_sealed = fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        if !is_sealed || file.metadata()?.len() != len as u64 {
            return Err(io::Error::other("the descriptor is not that of a segment"));
        }
        Ok(Self { map: MmapOptions::new().len(len).map_raw(&file)? })
    }

    fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns the word at an offset.
    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at <= self.len() - 4, "word {at} of {} bytes", self.len());
        // SAFETY: in bounds and aligned, since mappings begin at a page; an atomic may be shared with who else writes it.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    /// Returns the double word at an offset.
    pub(super) fn double_word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at <= self.len() - 8, "double word {at} of {} bytes", self.len());
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    /// Copies bytes into the segment.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        // SAFETY: in bounds; `bytes` is memory that only this process writes, so the two do not overlap.
        unsafe { self.map.as_mut_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    /// Copies bytes out of the segment.
    pub(super) fn read(&self, at: usize, into: &mut [u8]) {
        self.check(at, into.len());
        // SAFETY: in bounds; `into` is borrowed exclusively, so it is no part of the mapping.
        unsafe { self.map.as_ptr().add(at).copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) }
    }

    fn check(&self, at: usize, len: usize) {
        let is_within = at.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(is_within, "{len} bytes at {at} of {}", self.len());
    }
}

/// Opens a descriptor of another process for reading and writing. Its link in `/proc` must begin with `what`: in another namespace
/// the number may belong to any process, and opening another kind of file could block or have side effects.
///
/// # Errors
/// Those of the system, and one for another kind of file.
pub(super) fn open_in(pid: u32, descriptor: u32, what: &str) -> io::Result<OwnedFd> {
    let path = format!("/proc/{pid}/fd/{descriptor}");
    if !readlink(&path, Vec::new())?.to_bytes().starts_with(what.as_bytes()) {
        return Err(io::Error::other(format!("the descriptor is not that of `{what}`")));
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    Ok(open(path, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;

    #[test]
    fn what_one_end_writes_the_other_reads() {
        let (mine, descriptor) = Segment::create(4096).unwrap();
        let theirs = Segment::open(std::process::id(), descriptor.number(), 4096).unwrap();
        drop(descriptor);
        theirs.write(100, b"hello");
        theirs.word(0).store(7, SeqCst);
        theirs.double_word(4088).store(9, SeqCst);
        let mut bytes = [0; 5];
        mine.read(100, &mut bytes);
        assert_eq!(&bytes, b"hello");
        assert_eq!((mine.word(0).load(SeqCst), mine.double_word(4088).load(SeqCst)), (7, 9));
    }

    #[test]
    fn what_is_no_segment_is_refused() {
        let pid = std::process::id();
        let (_mine, descriptor) = Segment::create(4096).unwrap();
        assert!(Segment::open(pid, descriptor.number(), 8192).is_err(), "another length");
        let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 4096).unwrap();
        assert!(Segment::open(pid, unsealed.as_raw_fd() as u32, 4096).is_err(), "it can be shrunk");
        assert!(Segment::open(pid, 1 << 20, 4096).is_err(), "no descriptor");
    }

    #[test]
    #[should_panic(expected = "bytes at")]
    fn nothing_is_written_past_the_end() {
        Segment::create(4096).unwrap().0.write(4090, &[0; 7]);
    }
}
