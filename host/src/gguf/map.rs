//! The bytes of a file: mapped, or held in memory.

use std::fs::{self, File};
use std::ops::Deref;
use std::path::Path;

use super::error::ErrorKind;

/// A whole file's bytes. They start at an address that is a multiple of 8, so that an aligned tensor
/// in the file is aligned in memory.
#[derive(Debug)]
pub(super) enum Bytes {
    Mapped(memmap2::Mmap),
    /// Words for the alignment, and the length in bytes.
    Held(Vec<u64>, usize),
    Empty,
}

impl Bytes {
    /// Maps a file for reading.
    pub(super) fn map(path: &Path) -> Result<Bytes, ErrorKind> {
        // Asked before opening: opening a pipe would block until somebody writes to it.
        let metadata = fs::metadata(path).map_err(ErrorKind::Io)?;
        if !metadata.is_file() {
            return Err(ErrorKind::NotAFile);
        }
        let file = File::open(path).map_err(ErrorKind::Io)?;
        if file.metadata().map_err(ErrorKind::Io)?.len() == 0 {
            return Ok(Bytes::Empty);
        }
        map_file(&file).map(Bytes::Mapped).map_err(ErrorKind::Io)
    }

    /// Copies bytes into memory of our own.
    pub(super) fn held(bytes: &[u8]) -> Bytes {
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Bytes::Held(words, bytes.len())
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Held(words, len) => &bytemuck::cast_slice(words)[..*len],
            Bytes::Empty => &[],
        }
    }
}

#[expect(unsafe_code, reason = "mapping a file is unsafe by nature; the only place outside CUDA code")]
fn map_file(file: &File) -> std::io::Result<memmap2::Mmap> {
    // SAFETY: The mapping is private and read-only, and nothing in this process writes to the file
    // through it. What Rust cannot rule out is another process that writes to the file or cuts it
    // short while it is mapped: changed bytes could then be seen mid-read, and touching a page past
    // the new end raises SIGBUS. The bytes are only ever read as `u8` and as plain numbers for which
    // every bit pattern is valid, and every length and offset is taken from a header that is parsed
    // once into owned values and checked against the mapped length, so a changed file gives wrong
    // numbers and never an access outside the mapping. Model files are not to be rewritten in place
    // while they are in use, which the README says.
    unsafe { memmap2::Mmap::map(file) }
}
