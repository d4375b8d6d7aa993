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
    // SAFETY: `Mmap::map` asks that the file does not change while it is mapped. Nothing in this process
    // writes to it; that no other process does cannot be enforced, and is the one duty that
    // `Gguf::open` puts on its caller in writing. What a breach leads to is kept small: headers are
    // parsed once into owned names, lengths and offsets that were checked against the mapped length,
    // so no later access leaves the mapping; tensor data is only read as integers and floats, for which
    // every bit pattern is valid; and a page beyond a shortened file raises SIGBUS.
    unsafe { memmap2::Mmap::map(file) }
}
