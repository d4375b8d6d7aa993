//! What can be wrong with a GGUF file, and where.

use std::fmt;
use std::path::{Path, PathBuf};

use gpu_kernels::blocks::GgmlType;

/// A failure to open or to read a GGUF file: which file, and what about it.
#[derive(Debug)]
pub struct GgufError {
    path: PathBuf,
    kind: Box<ErrorKind>,
}

impl GgufError {
    pub(super) fn new(path: &Path, kind: ErrorKind) -> GgufError {
        GgufError { path: path.to_owned(), kind: Box::new(kind) }
    }

    /// The file that the error is about; for a split model the shard.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }
}

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.kind)
    }
}

impl std::error::Error for GgufError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // `ErrorKind` is already part of the message; only what lies under it is a source.
        std::error::Error::source(&*self.kind)
    }
}

/// The place in a file's header that an error is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The fixed-size start of the file.
    Header,
    /// The metadata pair with this number, counted from 0, before its key is known.
    PairNumber(u64),
    /// The metadata pair with this key.
    Key(String),
    /// The tensor with this number, counted from 0, before its name is known.
    TensorNumber(u64),
    /// The tensor with this name.
    Tensor(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Header => write!(f, "file header"),
            Place::PairNumber(n) => write!(f, "metadata pair {n}"),
            Place::Key(key) => write!(f, "metadata key {key:?}"),
            Place::TensorNumber(n) => write!(f, "tensor number {n}"),
            Place::Tensor(name) => write!(f, "tensor {name:?}"),
        }
    }
}

/// What is wrong with a file. Offsets are in bytes from the start of the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum ErrorKind {
    #[error(transparent)]
    Io(std::io::Error),
    #[error("not a regular file")]
    NotAFile,
    #[error("not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"")]
    Magic { found: Vec<u8> },
    #[error("big-endian GGUF; only little-endian files are supported")]
    BigEndian,
    #[error("GGUF version {0} is not supported, only versions 2 and 3 are")]
    Version(u32),
    #[error("{place}: {what} at offset {offset} needs {needed} bytes, the file has {present} left")]
    Truncated { place: Place, what: &'static str, offset: u64, needed: u128, present: u64 },
    #[error("{place}: value type {id} at offset {offset} is unknown")]
    ValueType { place: Place, offset: u64, id: u32 },
    #[error("{place}: arrays are nested too deeply at offset {offset}")]
    Nesting { place: Place, offset: u64 },
    #[error("{place}: boolean {byte} at offset {offset} is neither 0 nor 1")]
    Bool { place: Place, offset: u64, byte: u8 },
    #[error("{place}: name at offset {offset} {problem}")]
    Name { place: Place, offset: u64, problem: &'static str },
    #[error("{place} appears twice")]
    Duplicate { place: Place },
    #[error("metadata key \"general.alignment\": {0} is not a power of two from 8 to 65536")]
    Alignment(i128),
    #[error("tensor {tensor:?}: {n_dims} dimensions; 1 to 4 are allowed")]
    DimCount { tensor: String, n_dims: u32 },
    #[error("tensor {tensor:?}: dimensions {dims:?} {problem}")]
    Dims { tensor: String, dims: Vec<u64>, problem: &'static str },
    #[error(
        "tensor {tensor:?}: rows of {cols} elements are not whole {ty} blocks of {}",
        ty.block_elems()
    )]
    PartialBlock { tensor: String, ty: GgmlType, cols: u64 },
    #[error(
        "tensor {tensor:?}: type {} is not supported (supported: {})",
        type_name(*id),
        supported_types()
    )]
    TensorType { tensor: String, id: u32 },
    #[error("tensor {tensor:?}: data offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned { tensor: String, offset: u64, alignment: u64 },
    #[error(
        "tensor {tensor:?}: {n_bytes} bytes at offset {offset} need a file of {} bytes, it has {present}",
        offset.saturating_add(u128::from(*n_bytes))
    )]
    TensorData { tensor: String, offset: u128, n_bytes: u64, present: u64 },
    #[error("split model: {0}")]
    Split(String),
    #[error("split model: this shard is missing ({0})")]
    ShardMissing(std::io::Error),
    #[error("metadata key {0:?} is missing")]
    KeyMissing(String),
    #[error("metadata key {key:?} is {found}, expected {wanted}")]
    KeyType { key: String, found: String, wanted: &'static str },
    #[error("metadata key {key:?}: {value} does not fit {wanted}")]
    KeyRange { key: String, value: i128, wanted: &'static str },
    #[error("metadata key {key:?}: {element}not valid UTF-8")]
    KeyUtf8 { key: String, element: String },
    #[error("tensor {0:?} is missing")]
    TensorMissing(String),
}

/// ggml's name of tensor type `id`, also for types that zinc does not read, so that a refusal says
/// `Q2_K` and not 10.
fn type_name(id: u32) -> String {
    const OTHERS: [(u32, &str); 23] = [
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (24, "I8"),
        (25, "I16"),
        (26, "I32"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (40, "NVFP4"),
        (41, "Q1_0"),
        (42, "Q2_0"),
    ];
    match OTHERS.iter().find(|(other, _)| *other == id) {
        Some((_, name)) => format!("{name} ({id})"),
        None => format!("number {id}"),
    }
}

fn supported_types() -> String {
    let names: Vec<&str> = GgmlType::ALL.iter().map(|ty| ty.name()).collect();
    names.join(", ")
}
