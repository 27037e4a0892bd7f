//! Weights in a Hugging Face folder: memory-mapped safetensors files, read in slices.
//!
//! Opening reads only the headers. Reading a slice accesses only its own bytes: rows in one piece, columns row by row.

pub(crate) mod header;
mod mmap;
mod noise;
pub(crate) mod other_format;
mod slice;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ryzanstein_config::{ByteSize, file};
use serde::Deserialize;
use serde_json::Value;

use self::header::{Entry, HeaderError};
use self::mmap::MappedFile;
#[doc(hidden)]
pub use self::noise::NoiseSource;
use self::slice::StoredMatrix;
pub(crate) use self::source::LEAVES;
pub use self::source::{Loader, MemorySource, RootSource, TensorSlice, WeightSource};
use ryzanstein_process_group::DType;

use crate::error::{Error, Result};
use crate::model::HEAD;
use crate::python_json;
use crate::tensor::Tensor;

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

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
    tensors: BTreeMap<String, StoredTensor>,
    /// Tensors that the index names and none of its files has, with the file that it names.
    absent: BTreeMap<String, String>,
    read: AtomicU64,
}

#[derive(Debug)]
struct WeightFile {
    path: PathBuf,
    map: MappedFile,
}

#[derive(Debug)]
struct StoredTensor {
    /// Index of its file.
    file: usize,
    /// Its name in the file.
    name: String,
    entry: Entry,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, Value>,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the files that `model.safetensors.index.json` names, and reads their headers. As in
    /// transformers, an index only chooses files: their headers say which tensors they have.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`], which names the missing, truncated or corrupt file or tensor. An index may only name files
    /// in its own folder. Two tensors of one name must be equal. A folder with an adapter is refused.
    pub fn open(directory: &Path) -> Result<Self> {
        let mut checkpoint = Self {
            directory: directory.into(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            absent: BTreeMap::new(),
            read: AtomicU64::new(0),
        };
        other_format::refuse_adapter(directory)?;
        let (single, index) = (directory.join(SINGLE), directory.join(INDEX));
        // If it is not a regular file, opening it returns an error that names it.
        let is_there = |path: &Path| path.symlink_metadata().is_ok();
        if is_there(&single) {
            checkpoint.add(&single)?;
        } else if is_there(&index) {
            checkpoint.add_indexed(&index)?;
        } else {
            let instead = other_format::instead_of_weights(directory);
            let instead =
                instead.as_deref().unwrap_or("name the folder of a model whose weights are safetensors");
            let reason = format!("there is neither {SINGLE} nor {INDEX} in this folder; {instead}");
            return Err(Error::checkpoint(directory, None, reason));
        }
        Ok(checkpoint)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let map = MappedFile::open(path)?;
        map.will_need(&(0..map.bytes().len().min(TYPICAL_HEADER)));
        let entries = header::parse(map.bytes())
            .map_err(|HeaderError { tensor, reason }| Error::checkpoint(path, tensor.as_deref(), reason))?;
        let file = self.files.len();
        self.files.push(WeightFile { path: path.into(), map });
        for (name, entry) in entries {
            self.insert(name.clone(), StoredTensor { file, name, entry })?;
        }
        Ok(())
    }

    /// Adds a tensor under a name. Some tools store a tensor twice; which of two different ones the model has, nobody knows.
    fn insert(&mut self, name: String, tensor: StoredTensor) -> Result<()> {
        if let Some(other) = self.tensors.get(&name) {
            let is_same = |a: &Entry, b: &Entry| a.dtype == b.dtype && a.shape == b.shape;
            let bytes = [&tensor, other].map(|stored| (stored.file, stored.entry.bytes.clone()));
            if !is_same(&tensor.entry, &other.entry) || !self.are_equal(&bytes) {
                let file = self.files[other.file].path.file_name().unwrap_or_default();
                let reason = format!(
                    "{} has it too, as `{}`, and the two differ; remove the file that does not belong to the model, or one of the \
                     two tensors",
                    file.to_string_lossy(),
                    other.name
                );
                return Err(Error::checkpoint(&self.files[tensor.file].path, Some(&tensor.name), reason));
            }
        }
        self.tensors.insert(name, tensor);
        Ok(())
    }

    /// Makes a tensor known by another name, if there is one.
    ///
    /// # Errors
    /// Returns an error if there is a different tensor of the new name.
    pub(crate) fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        self.tensors.remove(from).map_or(Ok(()), |tensor| self.insert(to.into(), tensor))
    }

    /// Returns true if two ranges of bytes of files are equal.
    fn are_equal(&self, ranges: &[(usize, Range<usize>); 2]) -> bool {
        let [length, other] = ranges.each_ref().map(|(_, range)| range.len());
        let mut pieces = (0..length).step_by(COPIED_AT_ONCE);
        length == other
            && pieces.all(|at| {
                let [one, other] = ranges.each_ref().map(|(file, range)| {
                    let part = range.start + at..range.start + length.min(at + COPIED_AT_ONCE);
                    (&self.files[*file].map, part)
                });
                let are_equal = one.0.bytes()[one.1.clone()] == other.0.bytes()[other.1.clone()];
                for (map, part) in [one, other] {
                    map.release(&part);
                }
                are_equal
            })
    }

    fn add_indexed(&mut self, path: &Path) -> Result<()> {
        let text = file::read_text(path, LARGEST_INDEX).map_err(|e| Error::file(path, e))?;
        let index: Index = python_json::parse(&text).map_err(|e| {
            Error::checkpoint(path, None, format!("this is no index of weights: {e}; download it again"))
        })?;
        let mut files = BTreeSet::new();
        for (tensor, name) in &index.weight_map {
            let reason = match name.as_str() {
                Some(name) if is_file_name(name) => {
                    files.insert(name);
                    continue;
                }
                Some(name) => {
                    format!("`{name}` is no plain file name; an index may only name files in its own folder")
                }
                None => format!(
                    "expected the name of a file in `weight_map`, found {name}; download the index again"
                ),
            };
            return Err(Error::checkpoint(path, Some(tensor), reason));
        }
        for name in files {
            self.add(&self.directory.join(name)).map_err(|error| match error {
                Error::File { source, .. } if source.is_not_found() => {
                    let reason = format!(
                        "`{name}` is not in this folder, and `weight_map` names it; download it, or the whole model again"
                    );
                    Error::checkpoint(path, None, reason)
                }
                other => other,
            })?;
        }
        let absent = index.weight_map.into_iter().filter(|(tensor, _)| !self.tensors.contains_key(tensor));
        self.absent = absent.filter_map(|(tensor, name)| Some((tensor, name.as_str()?.into()))).collect();
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
        self.tensors.values().map(|tensor| tensor.entry.bytes.len() as u64).sum()
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
            let dtype = self.dtype(self.find(name)?)?;
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

    /// Copies a slice into the rows of `target` from row `at` on, rounded to its type.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing, has another shape or an unsupported type, or if a range is out of bounds.
    pub fn read_into(&self, slice: &TensorSlice<'_>, target: &mut Tensor, at: usize) -> Result<()> {
        let (file, range, stored) = self.stored(slice.name, slice.shape)?;
        slice.check(target, at)?;
        let TensorSlice { rows, columns, .. } = slice.clone();
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
        let [(_, _, one), (_, _, other)] = &stored;
        if one.dtype != other.dtype {
            return Ok(false);
        }
        let width = one.columns * one.dtype.size();
        let bytes = rows.start * width..rows.end * width;
        let [one, other] = stored;
        Ok(self.are_equal(
            &[one, other].map(|(file, range, _)| (file, range.start + bytes.start..range.start + bytes.end)),
        ))
    }

    fn find(&self, name: &str) -> Result<&StoredTensor> {
        self.tensors.get(name).ok_or_else(|| self.missing(name))
    }

    /// Returns the error for a tensor that the model needs and no file has.
    fn missing(&self, name: &str) -> Error {
        // A base model is stored without the prefix `model.`, in the index too.
        let bare = name.strip_prefix("model.").unwrap_or(name);
        if let Some(file) = self.absent.get(name).or_else(|| self.absent.get(bare)) {
            let reason = format!("it is not in `{file}`, where this index says it is; download both again");
            return Error::checkpoint(&self.directory.join(INDEX), Some(name), reason);
        }
        let with_suffix = |suffix| {
            self.tensors.values().find_map(|stored| {
                let prefix = stored.name.strip_suffix(suffix)?;
                // With a number, it is a tensor of some layer.
                let is_prefix = prefix.ends_with('.') && !prefix.contains(|c: char| c.is_ascii_digit());
                is_prefix.then_some((&stored.name, prefix))
            })
        };
        let reason = match with_suffix(name).or_else(|| with_suffix(bare)) {
            Some((found, prefix)) => {
                let command = other_format::command_without_prefix(&self.directory, prefix);
                let command = command.map(|command| format!(" with `{command}`")).unwrap_or_default();
                format!("the weights have it as `{found}`; remove the prefix{command}")
            }
            None if name == HEAD => "the weights have no head, and `tie_word_embeddings` of config.json is not true: a base model \
                                     computes no tokens; download the model with its head, or set the key to true if the \
                                     embedding is the head"
                .into(),
            None => format!(
                "it is in none of the weight files, and config.json says that the model has it; are both of the same model?{}",
                self.unread()
            ),
        };
        Error::checkpoint(&self.directory, Some(name), reason)
    }

    /// Returns a sentence with the first safetensors files of the folder that are not part of the checkpoint, if there are any.
    fn unread(&self) -> String {
        const SHOWN: usize = 3;
        let is_read = |name: &str| self.files.iter().any(|file| file.path.ends_with(name));
        let mut names = other_format::files(&self.directory, &["safetensors"]);
        names.retain(|name| !is_read(name));
        if names.is_empty() {
            return String::new();
        }
        if names.len() > SHOWN {
            names.splice(SHOWN.., ["…".into()]);
        }
        format!(" Files of this folder that were not read: {}", names.join(", "))
    }

    fn dtype(&self, tensor: &StoredTensor) -> Result<DType> {
        match tensor.entry.dtype.as_str() {
            "F32" => Ok(DType::F32),
            "F16" => Ok(DType::F16),
            "BF16" => Ok(DType::BF16),
            other => {
                let reason = format!(
                    "expected type F32, F16 or BF16, found {other}; convert the weights to one of these"
                );
                Err(Error::checkpoint(&self.files[tensor.file].path, Some(&tensor.name), reason))
            }
        }
    }

    fn stored(&self, name: &str, shape: &[usize]) -> Result<(usize, Range<usize>, StoredMatrix<'_>)> {
        let tensor = self.find(name)?;
        let dtype = self.dtype(tensor)?;
        let StoredTensor { file, name, entry } = tensor;
        let WeightFile { path, map } = &self.files[*file];
        if entry.shape != shape {
            let found = &entry.shape;
            let reason =
                format!("expected shape {shape:?}, found {found:?}; is config.json that of these weights?");
            return Err(Error::checkpoint(path, Some(name), reason));
        }
        let bytes = &map.bytes()[entry.bytes.clone()];
        Ok((
            *file,
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
