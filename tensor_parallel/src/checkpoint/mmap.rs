//! The one place where a file becomes memory.

use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;

use memmap2::{Advice, Mmap, UncheckedAdvice};
use ryzanstein_config::file;

use super::error::CheckpointError;
use crate::error::{Error, Result};

/// A file mapped for reading. Pages are read from disk when they are touched.
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
            return Err(Error::checkpoint(path, None, CheckpointError::Empty));
        }
        #[expect(unsafe_code, reason = "mapping a file is unsafe however it is done")]
        // SAFETY: the map is only read. What cannot be checked is that no other process truncates or rewrites the file
        // while it is mapped: reading a truncated part ends the process with SIGBUS, a rewritten part gives the new
        // bytes. Weight files are written once; whoever replaces one must rename a new file over it.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::file(path, e))?;
        file::check_fetched(&map[..map.len().min(64)]).map_err(|e| Error::file(path, e))?;
        // Reads ahead only what `will_need` names: the system's own guess reads megabytes around every page touched, most of
        // which belong to other ranks. If the system ignores the advice, reading is slower, no more.
        let _ = map.advise(Advice::Random);
        Ok(Self { map, file })
    }

    /// The content.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Asks for a range to be read ahead.
    pub(crate) fn will_need(&self, range: &Range<usize>) {
        // A length of 0 would mean the rest of the file. The advice goes through the file: through the map a call takes three
        // times as long, and a matrix sharded by columns needs one call for each row.
        let Some(length) = NonZeroU64::new(range.len() as u64) else { return };
        let _ =
            rustix::fs::fadvise(&self.file, range.start as u64, Some(length), rustix::fs::Advice::WillNeed);
    }

    /// Gives up the pages of a range that has been copied. They stay in the page cache, and are found there when they are
    /// touched again.
    pub(crate) fn release(&self, range: &Range<usize>) {
        if range.is_empty() {
            return;
        }
        #[expect(unsafe_code, reason = "MADV_DONTNEED discards writes to private and anonymous mappings")]
        // SAFETY: the map is of a file and only read, so a page that is touched again has the file's bytes, as before.
        let _ =
            unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
    }
}
