//! GGUF model files: reading ([`Gguf`]) and writing ([`Writer`]).
//!
//! A file is hostile input. Every count, length, product and sum is checked against the bytes that are
//! really there before anything is allocated or looped over by it, so that opening a file takes time
//! and memory in proportion to its header at most; afterwards the accessors cannot go out of bounds.
//!
//! Deliberate limits: little-endian versions 2 and 3; only the tensor types of [`GgmlType`], a file
//! with any other is refused as a whole; of a split model only the first shard's metadata is used.
//! Keys and tensor names must be UTF-8. Strings in values are kept as bytes, because files in the wild
//! hold broken ones: [`Gguf::str`] and [`Gguf::strings`] refuse those with the key and index, and
//! [`Gguf::get`] gives the bytes.
//!
//! No number of a file enters plain arithmetic, which panics where debug builds check it and wraps elsewhere: the lint
//! below refuses it, so both kinds of build do the same.

#![deny(clippy::arithmetic_side_effects)]

mod access;
mod cursor;
mod error;
mod header;
mod map;
mod split;
mod tensor;
mod value;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

pub use error::{ErrorKind, GgufError, Place};
pub use gpu_kernels::blocks::GgmlType;
pub use tensor::{Tensor, TensorInfo};
pub use value::{Array, Value, ValueType};
pub use writer::{Layout, Writer};

use header::Header;
use map::Bytes;
use value::Stored;

/// File offsets are u64 and are kept as usize.
const _: () = assert!(usize::BITS == 64, "models are larger than a 32-bit address space");

/// The result of reading from a GGUF file.
pub type Result<T, E = GgufError> = std::result::Result<T, E>;

/// A file and its bytes.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    bytes: Bytes,
}

/// An open GGUF model: metadata, and tensors over one or more mapped files.
#[derive(Debug)]
pub struct Gguf {
    /// At least one.
    shards: Vec<Shard>,
    /// Of the first shard.
    pairs: BTreeMap<Box<str>, Stored>,
    tensors: Vec<TensorInfo>,
    /// Index in `tensors` by name.
    by_name: HashMap<String, usize>,
}

impl Gguf {
    /// Maps and checks the file at `path`. If it is a shard of a split model
    /// (`NAME-00001-of-00003.gguf`; any shard will do), maps and checks the whole set.
    ///
    /// The files must not be written to or cut short while the value lives: their bytes are borrowed, not
    /// copied. To replace a model, rename a new file over it.
    ///
    /// # Errors
    /// If a file cannot be read, is not GGUF, or is damaged; if a shard is missing or does not belong
    /// to the set.
    pub fn open(path: &Path) -> Result<Gguf> {
        let bytes = Bytes::map(path).map_err(|kind| GgufError::new(path, kind))?;
        let first = Gguf::from_bytes(path, bytes)?;
        split::complete(first)
    }

    /// Parses a whole file held in memory, which must not be a part of a split model.
    ///
    /// # Errors
    /// As [`Gguf::open`]; messages name the file `<memory>`.
    pub fn parse(bytes: &[u8]) -> Result<Gguf> {
        let gguf = Gguf::from_bytes(Path::new("<memory>"), Bytes::held(bytes))?;
        split::refuse(&gguf)?;
        Ok(gguf)
    }

    fn from_bytes(path: &Path, bytes: Bytes) -> Result<Gguf> {
        let header = Header::parse(&bytes).map_err(|kind| GgufError::new(path, kind))?;
        let Header { pairs, tensors } = header;
        let by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        let shards = vec![Shard { path: path.to_owned(), bytes }];
        Ok(Gguf { shards, pairs, tensors, by_name })
    }

    /// The file, or the first shard.
    pub fn path(&self) -> &Path {
        &self.shards[0].path
    }

    /// Sizes in bytes of the files that make up the model.
    pub fn shard_bytes(&self) -> impl ExactSizeIterator<Item = usize> {
        self.shards.iter().map(|shard| shard.bytes.len())
    }

    /// All tensors, in the order of the files' tables.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// The tensor with this name, if there is one.
    pub fn find(&self, name: &str) -> Option<Tensor<'_>> {
        let info = &self.tensors[*self.by_name.get(name)?];
        let file: &[u8] = &self.shards[info.shard].bytes;
        Some(Tensor { info, data: &file[info.offset..][..info.n_bytes] })
    }

    /// The tensor with this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        self.find(name).ok_or_else(|| self.error(ErrorKind::TensorMissing(name.to_owned())))
    }

    fn error(&self, kind: ErrorKind) -> GgufError {
        GgufError::new(self.path(), kind)
    }
}
