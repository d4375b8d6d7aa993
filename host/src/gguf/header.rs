//! The header of one GGUF file: metadata, then the tensor table.
//!
//! ```text
//! "GGUF"  version:u32  n_tensors:u64  n_pairs:u64
//! n_pairs   × { key:string  type:u32  value }
//! n_tensors × { name:string  n_dims:u32  dims:[u64; n_dims]  type:u32  offset:u64 }
//! padding to a multiple of general.alignment, then the data that the offsets count from
//! ```
//!
//! Source: the GGUF specification (`docs/gguf.md` of ggml). Version 2 differs only in what its writer
//! promised about byte order; version 1 had 32-bit counts.

use std::collections::{BTreeMap, HashSet};

use super::cursor::Cursor;
use super::error::{ErrorKind, Place};
use super::tensor::TensorInfo;
use super::value::{Stored, Value};

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
pub(super) const DEFAULT_ALIGNMENT: usize = 32;
/// More than a page, and than any file uses; keeps the padding after the header small.
const MAX_ALIGNMENT: i128 = 65536;
/// Bytes that a table entry surely takes. Deliberately weak: it stops absurd counts at once, and leaves a
/// file that was merely cut to the error about the pair or tensor where it ends.
const MIN_ENTRY_BYTES: u64 = 1;

/// A parsed and checked header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) pairs: BTreeMap<Box<str>, Stored>,
    /// In file order, with absolute offsets.
    pub(super) tensors: Vec<TensorInfo>,
}

impl Header {
    /// Reads the header of a whole file, and checks that all tensor data is inside it.
    pub(super) fn parse(file: &[u8]) -> Result<Header, ErrorKind> {
        let mut cursor = Cursor::new(file);
        check_version(file, &mut cursor)?;
        let n_tensors = cursor.u64("tensor count")?;
        let n_pairs = cursor.u64("metadata pair count")?;
        cursor.expect_room("metadata", n_pairs, MIN_ENTRY_BYTES)?;
        cursor.expect_room("tensor table", n_tensors, MIN_ENTRY_BYTES)?;

        let pairs = read_pairs(&mut cursor, n_pairs)?;
        let alignment = alignment(&pairs, file)?;
        let mut tensors = read_tensors(&mut cursor, n_tensors)?;

        // The header ends inside the file and the alignment is small: no overflow.
        let data_start = cursor.pos().next_multiple_of(alignment);
        for tensor in &mut tensors {
            tensor.place(data_start, alignment, file.len())?;
        }
        Ok(Header { pairs, tensors })
    }
}

fn check_version(file: &[u8], cursor: &mut Cursor<'_>) -> Result<(), ErrorKind> {
    let found = &file[..file.len().min(MAGIC.len())];
    if found != MAGIC {
        return Err(ErrorKind::Magic { found: found.to_vec() });
    }
    cursor.take("magic", MAGIC.len() as u64)?;
    match cursor.u32("version")? {
        2 | 3 => Ok(()),
        // The magic is the same bytes in both byte orders; only the version shows the order.
        swapped if swapped != 0 && swapped.trailing_zeros() >= 16 => Err(ErrorKind::BigEndian),
        version => Err(ErrorKind::Version(version)),
    }
}

fn read_pairs(cursor: &mut Cursor<'_>, n_pairs: u64) -> Result<BTreeMap<Box<str>, Stored>, ErrorKind> {
    let mut pairs = BTreeMap::new();
    for i in 0..n_pairs {
        cursor.place = Place::PairNumber(i);
        let key = cursor.name()?;
        cursor.place = Place::Key(key.to_owned());
        let value = Stored::read(cursor)?;
        if pairs.insert(key.into(), value).is_some() {
            return Err(ErrorKind::Duplicate { place: cursor.place.clone() });
        }
    }
    Ok(pairs)
}

fn read_tensors(cursor: &mut Cursor<'_>, n_tensors: u64) -> Result<Vec<TensorInfo>, ErrorKind> {
    let mut tensors = Vec::new();
    for i in 0..n_tensors {
        cursor.place = Place::TensorNumber(i);
        tensors.push(TensorInfo::read(cursor)?);
    }
    let mut names = HashSet::new();
    match tensors.iter().find(|tensor| !names.insert(&tensor.name)) {
        Some(twice) => Err(ErrorKind::Duplicate { place: Place::Tensor(twice.name.clone()) }),
        None => Ok(tensors),
    }
}

/// `general.alignment`, which may be any integer type; 32 where the key is missing.
fn alignment(pairs: &BTreeMap<Box<str>, Stored>, file: &[u8]) -> Result<usize, ErrorKind> {
    const KEY: &str = "general.alignment";
    let Some(stored) = pairs.get(KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    let value: Value<'_> = stored.view(file);
    let Some(alignment) = value.int() else {
        let found = value.describe();
        return Err(ErrorKind::KeyType { key: KEY.to_owned(), found, wanted: "an integer" });
    };
    // At least 8, as the specification has it: blocks are then aligned in a mapped file.
    if !(8..=MAX_ALIGNMENT).contains(&alignment) || alignment.count_ones() != 1 {
        return Err(ErrorKind::Alignment(alignment));
    }
    Ok(alignment as usize)
}
