//! Memory-mapped weight files.

use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;

use memmap2::{Advice, Mmap, UncheckedAdvice};
use ryzanstein_config::file;

use crate::error::{Error, Result};

/// A file mapped for reading. Pages are read from disk when they are accessed.
#[derive(Debug)]
pub(crate) struct MappedFile {
    map: Mmap,
    file: File,
}

impl MappedFile {
    /// Maps a whole file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = file::open(path).map_err(|e| Error::file(path, e))?;
        let length = file.metadata().map_err(|e| Error::file(path, e))?.len();
        if length == 0 {
            return Err(Error::checkpoint(path, None, "the file is empty; download it again"));
        }
        #[expect(unsafe_code, reason = "mapping a file is unsafe however it is done")]
        // SAFETY: the map is only read. It cannot be verified that no other process truncates or rewrites the file while it is
        // mapped: reading a truncated part ends the process with SIGBUS, a rewritten part gives the new bytes. Weight files are
        // written once; a process that replaces one must rename a new file over it.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::file(path, e))?;
        file::check_fetched(&map[..map.len().min(64)]).map_err(|e| Error::file(path, e))?;
        // Only ranges given to `will_need` are read ahead: by default the system reads megabytes around every accessed page, most
        // of which belong to other ranks. If the system ignores the advice, reading is only slower.
        let _ = map.advise(Advice::Random);
        Ok(Self { map, file })
    }

    /// Returns the content of the file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Requests read-ahead of a range.
    pub(crate) fn will_need(&self, range: &Range<usize>) {
        // A length of 0 would mean the rest of the file. The advice is given for the file, not for the map: a call for the map
        // takes longer, and a matrix sharded by columns needs one call for each row.
        let Some(length) = NonZeroU64::new(range.len() as u64) else { return };
        let _ =
            rustix::fs::fadvise(&self.file, range.start as u64, Some(length), rustix::fs::Advice::WillNeed);
    }

    /// Releases the pages of a range that has been copied. They stay in the page cache for later accesses.
    pub(crate) fn release(&self, range: &Range<usize>) {
        if range.is_empty() {
            return;
        }
        #[expect(unsafe_code, reason = "MADV_DONTNEED discards writes to private and anonymous mappings")]
        // SAFETY: the map is of a file and only read, so a released page has the same bytes when it is accessed again.
        let _ =
            unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
    }
}
