//! Weights in a Hugging Face folder: memory-mapped safetensors files, read in slices.
//!
//! Opening reads only the headers. Reading a slice accesses only its own bytes: rows in one piece, columns row by row.

pub(crate) mod error;
pub(crate) mod header;
mod mmap;
mod noise;
mod slice;
mod source;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ryzanstein_config::{ByteSize, file};
use serde::Deserialize;

pub use self::error::CheckpointError;
use self::header::{Entry, HeaderError};
use self::mmap::MappedFile;
#[doc(hidden)]
pub use self::noise::NoiseSource;
use self::slice::StoredMatrix;
pub use self::source::{
    Loader, LocalSource, MemorySource, RootSource, ShardedTensor, Sharding, WeightSource,
};
use ryzanstein_process_group::DType;

use crate::error::{Error, Result};
use crate::tensor::Tensor;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The maximum gap, two pages, between slices of rows that are read ahead as one range.
const READ_AHEAD_GAP: usize = 8192;

/// Number of bytes that are copied before their pages are released. A larger value takes more memory; a smaller one makes more
/// system calls.
const COPIED_AT_ONCE: usize = 8 << 20;

/// A size that most headers do not exceed.
const TYPICAL_HEADER: usize = 256 << 10;

/// Limit of the index's size, larger than that of any model.
const LARGEST_INDEX: ByteSize = ByteSize::mib(64);

/// The weight files of one model.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    files: Vec<WeightFile>,
    tensors: BTreeMap<String, (usize, Entry)>,
    read: AtomicU64,
}

#[derive(Debug)]
struct WeightFile {
    path: PathBuf,
    map: MappedFile,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the files that `model.safetensors.index.json` names, and reads their headers.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`], which names the missing, truncated or corrupt file or tensor. An index may only name files
    /// in its own folder.
    pub fn open(directory: &Path) -> Result<Self> {
        let mut checkpoint = Self {
            directory: directory.into(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            read: AtomicU64::new(0),
        };
        let (single, index) = (directory.join(SINGLE), directory.join(INDEX));
        // If it is not a regular file, opening it returns an error that names it.
        if single.exists() {
            checkpoint.add(&single)?;
        } else if index.exists() {
            checkpoint.add_indexed(&index)?;
        } else {
            let error = CheckpointError::NoFiles { single: SINGLE, index: INDEX };
            return Err(Error::checkpoint(directory, None, error));
        }
        Ok(checkpoint)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let map = MappedFile::open(path)?;
        map.will_need(&(0..map.bytes().len().min(TYPICAL_HEADER)));
        let entries = header::parse(map.bytes())
            .map_err(|HeaderError { tensor, source }| Error::checkpoint(path, tensor.as_deref(), source))?;
        let file = self.files.len();
        for (name, entry) in entries {
            if self.tensors.contains_key(&name) {
                return Err(Error::checkpoint(path, Some(&name), CheckpointError::Duplicate));
            }
            self.tensors.insert(name, (file, entry));
        }
        self.files.push(WeightFile { path: path.into(), map });
        Ok(())
    }

    fn add_indexed(&mut self, path: &Path) -> Result<()> {
        let text = file::read(path, LARGEST_INDEX).map_err(|e| Error::file(path, e))?;
        let index: Index = serde_json::from_slice(&text)
            .map_err(|e| Error::checkpoint(path, None, CheckpointError::Index(e)))?;
        let mut seen = HashSet::new();
        for (tensor, name) in &index.weight_map {
            if !is_file_name(name) {
                let error = CheckpointError::FileName { name: name.clone() };
                return Err(Error::checkpoint(path, Some(tensor), error));
            }
            if seen.insert(name) {
                self.add(&self.directory.join(name))?;
            }
        }
        for (tensor, name) in &index.weight_map {
            let found = self.tensors.get(tensor).map(|(file, _)| &self.files[*file].path);
            if found.is_none_or(|found| *found != self.directory.join(name)) {
                let error = CheckpointError::NotInFile { name: name.clone() };
                return Err(Error::checkpoint(path, Some(tensor), error));
            }
        }
        Ok(())
    }

    /// Returns the folder.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Iterates over the names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns true if there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the bytes of tensor data in all files.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|(_, e)| e.bytes.len() as u64).sum()
    }

    /// Returns the bytes of tensor data that have been read so far.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Returns the common type of the named tensors, or `f32` if their types differ.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or has an unsupported type.
    pub fn common_dtype<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Result<DType> {
        let mut common = None;
        for name in names {
            let (file, entry) = self.find(name)?;
            let dtype = self.dtype(name, file, entry)?;
            if *common.get_or_insert(dtype) != dtype {
                return Ok(DType::F32);
            }
        }
        Ok(common.unwrap_or(DType::F32))
    }

    /// Checks that a tensor exists and has a supported type and this shape. Reads none of its data.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`] with the expected and the actual value.
    pub fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.stored(name, shape).map(|_| ())
    }

    /// Copies `rows` × `columns` of a tensor into `target`, from its row `at` on, rounded to the target's type. A vector is one
    /// column.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing, has another shape or an unsupported type, or if a range is out of bounds.
    pub fn read_into(
        &self,
        name: &str,
        shape: &[usize],
        rows: Range<usize>,
        columns: Range<usize>,
        target: &mut Tensor,
        at: usize,
    ) -> Result<()> {
        let (file, range, stored) = self.stored(name, shape)?;
        let fits = rows.start <= rows.end
            && rows.end <= shape.first().copied().unwrap_or(1)
            && columns.start <= columns.end
            && columns.end <= stored.columns
            && columns.len() == target.columns()
            && at.checked_add(rows.len()).is_some_and(|end| end <= target.rows());
        if !fits {
            return Err(Error::input(format!(
                "rows {rows:?} and columns {columns:?} of tensor `{name}` {shape:?} do not fit a target of {:?} at row {at}",
                target.shape()
            )));
        }
        let size = stored.dtype.size();
        let piece = |row: usize, columns: &Range<usize>| {
            let start = range.start + (row * stored.columns + columns.start) * size;
            start..start + columns.len() * size
        };
        let map = &self.files[file].map;
        if (stored.columns - columns.len()) * size < READ_AHEAD_GAP {
            let start = piece(rows.start, &columns).start;
            map.will_need(&(start..piece(rows.end, &columns).start.clamp(start, range.end.max(start))));
        } else {
            for row in rows.clone() {
                map.will_need(&piece(row, &columns));
            }
        }
        let bytes = rows.len() * columns.len() * size;
        // For a GPU, the whole slice is copied at once, by several threads.
        let is_on_host = target.device().is_none();
        let step =
            if is_on_host { COPIED_AT_ONCE / (stored.columns * size).max(1) } else { rows.len() }.max(1);
        for start in rows.clone().step_by(step) {
            let part = start..rows.end.min(start + step);
            slice::copy(stored, part.clone(), &columns, target, at + start - rows.start)?;
            if is_on_host {
                map.release(&(piece(start, &columns).start..piece(part.end - 1, &columns).end));
            }
        }
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Returns true if these rows of two tensors of this shape are equal, with elements of one type.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing, has another shape or an unsupported type.
    pub(crate) fn has_equal_rows(
        &self,
        names: [&str; 2],
        shape: &[usize],
        rows: Range<usize>,
    ) -> Result<bool> {
        let stored = [self.stored(names[0], shape)?, self.stored(names[1], shape)?];
        let [(_, _, one), (_, _, other)] = stored;
        if one.dtype != other.dtype {
            return Ok(false);
        }
        let width = one.columns * one.dtype.size();
        let step = (COPIED_AT_ONCE / width.max(1)).max(1);
        for start in rows.clone().step_by(step) {
            let part = start * width..rows.end.min(start + step) * width;
            let are_equal = one.bytes[part.clone()] == other.bytes[part.clone()];
            for (file, range, _) in &stored {
                self.files[*file].map.release(&(range.start + part.start..range.start + part.end));
            }
            if !are_equal {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn find(&self, name: &str) -> Result<(usize, &Entry)> {
        match self.tensors.get(name) {
            Some((file, entry)) => Ok((*file, entry)),
            None => Err(Error::checkpoint(&self.directory, Some(name), CheckpointError::Missing)),
        }
    }

    fn dtype(&self, name: &str, file: usize, entry: &Entry) -> Result<DType> {
        match entry.dtype.as_str() {
            "F32" => Ok(DType::F32),
            "F16" => Ok(DType::F16),
            "BF16" => Ok(DType::BF16),
            other => {
                let error = CheckpointError::DType { found: other.into() };
                Err(Error::checkpoint(&self.files[file].path, Some(name), error))
            }
        }
    }

    fn stored(&self, name: &str, shape: &[usize]) -> Result<(usize, Range<usize>, StoredMatrix<'_>)> {
        let (file, entry) = self.find(name)?;
        let dtype = self.dtype(name, file, entry)?;
        let WeightFile { path, map } = &self.files[file];
        if entry.shape != shape {
            let error = CheckpointError::Shape { expected: shape.into(), found: entry.shape.clone() };
            return Err(Error::checkpoint(path, Some(name), error));
        }
        let bytes = &map.bytes()[entry.bytes.clone()];
        Ok((
            file,
            entry.bytes.clone(),
            StoredMatrix { bytes, dtype, columns: shape.iter().skip(1).product() },
        ))
    }
}

fn is_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !name.ends_with('/')
}

#[cfg(test)]
mod tests;
