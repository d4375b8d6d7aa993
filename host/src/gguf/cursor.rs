//! A reading position in a file's bytes that never passes the end.

use super::error::{ErrorKind, Place};

/// Longest key or tensor name, in bytes. Source: GGUF specification, "metadata_kv_t".
const MAX_NAME_BYTES: u64 = 65535;

/// Reads little-endian values front to back. Every read is checked against the bytes that are left,
/// and every error carries the current [`Place`] and file offset.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
    /// What is being read, for error messages.
    pub(super) place: Place,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, pos: 0, place: Place::Header }
    }

    pub(super) fn pos(&self) -> usize {
        self.pos
    }

    /// The bytes from an earlier position up to here.
    pub(super) fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.pos]
    }

    /// Bytes between the position and the end of the file.
    pub(super) fn left(&self) -> usize {
        self.bytes.len().saturating_sub(self.pos)
    }

    /// Fails unless `count` items of at least `min_bytes` each can still follow, so that no loop and
    /// no allocation is ever sized by a count that the file cannot hold.
    pub(super) fn expect_room(&self, what: &'static str, count: u64, min_bytes: u64) -> Result<(), ErrorKind> {
        let needed = u128::from(count).saturating_mul(u128::from(min_bytes));
        if needed <= self.left() as u128 {
            return Ok(());
        }
        Err(ErrorKind::Truncated {
            place: self.place.clone(),
            what,
            offset: self.pos as u64,
            needed,
            present: self.left() as u64,
        })
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, what: &'static str, len: u64) -> Result<&'a [u8], ErrorKind> {
        self.expect_room(what, len, 1)?;
        // In range: `len` is at most `left()`, which is a usize.
        let end = self.pos.saturating_add(len as usize);
        let taken = &self.bytes[self.pos..end];
        self.pos = end;
        Ok(taken)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, ErrorKind> {
        let bytes = self.take(what, 4)?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("took 4 bytes")))
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, ErrorKind> {
        let bytes = self.take(what, 8)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("took 8 bytes")))
    }

    /// A length-prefixed key or tensor name: 1 to 65535 bytes of UTF-8.
    pub(super) fn name(&mut self) -> Result<&'a str, ErrorKind> {
        let offset = self.pos as u64;
        let len = self.u64("name length")?;
        let bytes = self.take("name", len)?;
        let problem = match std::str::from_utf8(bytes) {
            Ok("") => "is empty",
            Ok(_) if len > MAX_NAME_BYTES => "is longer than 65535 bytes",
            Ok(name) => return Ok(name),
            Err(_) => "is not valid UTF-8",
        };
        Err(ErrorKind::Name { place: self.place.clone(), offset, problem })
    }
}
