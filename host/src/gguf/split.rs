//! Split models: a set of files `NAME-00001-of-0000N.gguf`.
//!
//! Each shard is a GGUF file with its own tensors and the keys `split.no` (counted from 0, while names
//! count from 1), `split.count`, and `split.tensors.count` (the total over all shards). Only the first
//! shard has the model's other metadata.

use std::io;
use std::path::{Path, PathBuf};

use super::{Bytes, ErrorKind, Gguf, GgufError, Place, Result};

/// `split.no`, `split.count` and `split.tensors.count` of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    no: u32,
    count: u32,
    n_tensors: u64,
}

impl Split {
    /// Counted from 1, as file names do; the key counts from 0.
    fn number(self) -> u32 {
        self.no.saturating_add(1)
    }

    /// The file's place in a set of two or more, or `None` for a file that is complete in itself.
    fn of(gguf: &Gguf) -> Result<Option<Split>> {
        let Some(count) = gguf.opt_u32("split.count")? else {
            return Ok(None);
        };
        let no = gguf.opt_u32("split.no")?.unwrap_or(0);
        if no >= count.max(1) {
            return Err(split_error(gguf, format!("split.no is {no}, split.count is {count}")));
        }
        if count <= 1 {
            return Ok(None);
        }
        let Some(n_tensors) = gguf.opt_u64("split.tensors.count")? else {
            let key = "split.tensors.count".to_owned();
            return Err(gguf.error(ErrorKind::KeyMissing(key)));
        };
        Ok(Some(Split { no, count, n_tensors }))
    }
}

fn split_error(gguf: &Gguf, message: String) -> GgufError {
    gguf.error(ErrorKind::Split(message))
}

/// Fails if the file is one of several.
pub(super) fn refuse(gguf: &Gguf) -> Result<()> {
    match Split::of(gguf)? {
        None => Ok(()),
        Some(split) => {
            let message = format!("this is only shard {} of {}", split.number(), split.count);
            Err(split_error(gguf, message))
        }
    }
}

/// Adds the other shards to the one that was opened, whichever it is.
pub(super) fn complete(opened: Gguf) -> Result<Gguf> {
    let Some(split) = Split::of(&opened)? else {
        return Ok(opened);
    };
    let opened_path = opened.path().to_owned();
    let Some(stem) = set_stem(&opened_path, split) else {
        let message = format!(
            "shard {} of {} must be named NAME-{:05}-of-{:05}.gguf",
            split.number(),
            split.count,
            split.number(),
            split.count
        );
        return Err(split_error(&opened, message));
    };
    let mut set = if split.no == 0 { opened } else { open_shard(&shard_path(&stem, 0, split.count), 0, split)? };
    for no in 1..split.count {
        let shard = open_shard(&shard_path(&stem, no, split.count), no, split)?;
        append(&mut set, shard)?;
    }
    if set.tensors.len() as u64 != split.n_tensors {
        let message = format!(
            "the {} shards hold {} tensors, split.tensors.count is {}",
            split.count,
            set.tensors.len(),
            split.n_tensors
        );
        return Err(split_error(&set, message));
    }
    Ok(set)
}

/// The path of a shard without `-0000K-of-0000N.gguf`, if its name ends so.
fn set_stem(path: &Path, split: Split) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let suffix = format!("-{:05}-of-{:05}.gguf", split.number(), split.count);
    Some(path.with_file_name(name.strip_suffix(&suffix)?))
}

fn shard_path(stem: &Path, no: u32, count: u32) -> PathBuf {
    let mut path = stem.as_os_str().to_owned();
    path.push(format!("-{:05}-of-{count:05}.gguf", u64::from(no) + 1));
    path.into()
}

/// Opens shard `no` (from 0) of the set that `set` describes.
fn open_shard(path: &Path, no: u32, set: Split) -> Result<Gguf> {
    let bytes = Bytes::map(path).map_err(|kind| {
        let kind = match kind {
            ErrorKind::Io(e) if e.kind() == io::ErrorKind::NotFound => ErrorKind::ShardMissing(e),
            other => other,
        };
        GgufError::new(path, kind)
    })?;
    let shard = Gguf::from_bytes(path, bytes)?;
    let wanted = Split { no, ..set };
    match Split::of(&shard)? {
        Some(found) if found == wanted => Ok(shard),
        found => {
            let found = match found {
                Some(s) => format!("number {} of {}, {} tensors in all", s.no, s.count, s.n_tensors),
                None => "not a part of a set".to_owned(),
            };
            let message = format!(
                "expected split.no {no} of {}, {} tensors in all; the file is {found}",
                set.count, set.n_tensors
            );
            Err(split_error(&shard, message))
        }
    }
}

/// Moves a shard's file and tensors to the set.
fn append(set: &mut Gguf, shard: Gguf) -> Result<()> {
    let Gguf { shards, tensors, .. } = shard;
    for mut tensor in tensors {
        tensor.shard = set.shards.len();
        if set.by_name.insert(tensor.name.clone(), set.tensors.len()).is_some() {
            let place = Place::Tensor(tensor.name);
            return Err(GgufError::new(&shards[0].path, ErrorKind::Duplicate { place }));
        }
        set.tensors.push(tensor);
    }
    set.shards.extend(shards);
    Ok(())
}
