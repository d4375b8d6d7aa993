//! Models in several files.

use std::fs;
use std::path::{Path, PathBuf};

use host::gguf::{Gguf, Value, Writer};
use host::model::config::Config;

use super::craft::{copy, golden, golden_path, logits};

/// What `split.*` keys a shard gets.
#[derive(Clone, Copy)]
struct Keys {
    no: u16,
    count: u16,
    n_tensors: i32,
}

impl Keys {
    /// As llama.cpp's gguf-split types them.
    fn put(self, writer: &mut Writer) {
        writer.put("split.no", Value::U16(self.no));
        writer.put("split.count", Value::U16(self.count));
        writer.put("split.tensors.count", Value::I32(self.n_tensors));
    }
}

/// Splits a golden model: tensor `i` goes to shard `i % count`, and only the first shard has metadata.
fn split(arch: &str, dir: &Path, count: u16, extra_tensors: i32) -> Vec<PathBuf> {
    let whole = golden(arch);
    let names: Vec<&str> = whole.tensors().map(|tensor| tensor.name.as_str()).collect();
    let n_tensors = names.len() as i32 + extra_tensors;
    let shard = |no: u16| {
        let mine = |name: &str| names.iter().position(|n| *n == name).unwrap() % usize::from(count) == usize::from(no);
        let keys = Keys { no, count, n_tensors };
        let bytes = copy(&whole, |_| no == 0, mine, |writer| keys.put(writer), &[]);
        let path = dir.join(format!("m-{:05}-of-{count:05}.gguf", no + 1));
        fs::write(&path, bytes).unwrap();
        path
    };
    (0..count).map(shard).collect()
}

#[track_caller]
fn assert_same(split: &Gguf, whole: &Gguf) {
    assert_eq!(split.tensors().len(), whole.tensors().len());
    for info in whole.tensors() {
        let found = split.tensor(&info.name).unwrap();
        assert_eq!((found.info.ty, found.info.dims()), (info.ty, info.dims()), "{}", info.name);
        assert_eq!(found.data(), whole.tensor(&info.name).unwrap().data(), "{}", info.name);
    }
    assert_eq!(Config::from_gguf(split).unwrap(), Config::from_gguf(whole).unwrap());
}

#[track_caller]
fn assert_open_fails(path: &Path, parts: &[&str]) {
    let message = Gguf::open(path).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// B10: any shard opens the whole set, whose logits are bit-equal to the one file's; 11 shards sort by number.
#[test]
fn b10_split_model_equals_the_whole() {
    for (arch, count) in [("llama", 3), ("qwen35moe", 11)] {
        let dir = tempfile::tempdir().unwrap();
        let shards = split(arch, dir.path(), count, 0);
        for path in [&shards[0], &shards[1], shards.last().unwrap()] {
            let gguf = Gguf::open(path).unwrap();
            assert_same(&gguf, &golden(arch));
            assert_eq!(gguf.shard_bytes().len(), usize::from(count));
            assert_eq!(gguf.path(), shards[0]);
            assert_eq!(logits(gguf), logits(golden(arch)), "{arch}");
        }
    }
}

#[test]
fn b10_missing_shard_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let shards = split("llama", dir.path(), 3, 0);
    fs::remove_file(&shards[2]).unwrap();
    assert_open_fails(&shards[0], &[shards[2].to_str().unwrap(), "missing"]);
    fs::remove_file(&shards[0]).unwrap();
    assert_open_fails(&shards[1], &[shards[0].to_str().unwrap(), "missing"]);
}

#[test]
fn b10_swapped_shards_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let shards = split("llama", dir.path(), 3, 0);
    let (second, third) = (fs::read(&shards[1]).unwrap(), fs::read(&shards[2]).unwrap());
    fs::write(&shards[1], third).unwrap();
    fs::write(&shards[2], second).unwrap();
    assert_open_fails(&shards[0], &["00002-of-00003", "expected split.no 1", "number 2"]);
}

#[test]
fn b10_wrong_tensor_total_is_refused() {
    for extra in [-1, 1] {
        let dir = tempfile::tempdir().unwrap();
        let shards = split("llama", dir.path(), 3, extra);
        assert_open_fails(&shards[0], &["20 tensors", "split.tensors.count"]);
    }
}

#[test]
fn b10_shard_of_another_set_is_refused() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let shards = split("llama", dir.path(), 3, 0);
    // The same names and counts, another model.
    fs::copy(&split("qwen3", other.path(), 3, 0)[1], &shards[1]).unwrap();
    assert_open_fails(&shards[0], &["00002-of-00003", "expected split.no 1 of 3"]);
    // A file that is no shard at all.
    fs::copy(golden_path("llama"), &shards[1]).unwrap();
    assert_open_fails(&shards[0], &["00002-of-00003", "not a part of a set"]);
}

#[test]
fn b10_doubled_tensor_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let shards = split("llama", dir.path(), 2, 1);
    let whole = golden("llama");
    // The first shard with the whole model in it; the second shard's tensors are then there twice.
    let keys = Keys { no: 0, count: 2, n_tensors: whole.tensors().len() as i32 + 1 };
    fs::write(&shards[0], copy(&whole, |_| true, |_| true, |writer| keys.put(writer), &[])).unwrap();
    assert_open_fails(&shards[0], &["00002-of-00002", "tensor", "twice"]);
}

#[test]
fn b10_a_set_of_one_loads_alone() {
    let dir = tempfile::tempdir().unwrap();
    let shards = split("llama", dir.path(), 1, 0);
    assert!(shards[0].ends_with("m-00001-of-00001.gguf"));
    assert_same(&Gguf::open(&shards[0]).unwrap(), &golden("llama"));
}

#[test]
fn b10_a_renamed_shard_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let shards = split("llama", dir.path(), 3, 0);
    let renamed = dir.path().join("model.gguf");
    fs::copy(&shards[0], &renamed).unwrap();
    assert_open_fails(&renamed, &["model.gguf", "must be named NAME-00001-of-00003.gguf"]);
    // In memory there are no other files to look for.
    let message = Gguf::parse(&fs::read(&shards[1]).unwrap()).unwrap_err().to_string();
    assert!(message.contains("only shard 2 of 3"), "{message}");
}

/// `split.count` costs nothing until files are there; `split.no` beyond it is refused.
#[test]
fn b10_absurd_split_keys_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (no, count, part) in [(0, u16::MAX, "missing"), (7, 3, "split.no is 7"), (1, 1, "split.no is 1")] {
        let path = dir.path().join(format!("m-{:05}-of-{count:05}.gguf", no + 1));
        let keys = Keys { no, count, n_tensors: 1 };
        fs::write(&path, copy(&golden("llama"), |_| true, |_| true, |writer| keys.put(writer), &[])).unwrap();
        assert_open_fails(&path, &[part]);
    }
}

/// B11: a head in the second shard is used, not the embedding in the first.
#[test]
fn b11_head_in_another_shard() {
    let dir = tempfile::tempdir().unwrap();
    let whole = golden("llama");
    let embd = whole.tensor("token_embd.weight").unwrap();
    let mut other = embd.data().to_vec();
    other.reverse();
    let n_tensors = whole.tensors().len() as i32 + 1;
    let first = Keys { no: 0, count: 2, n_tensors };
    let second = Keys { no: 1, ..first };
    let head = [("output.weight", embd.info.ty, embd.info.dims().to_vec(), &other[..])];
    let paths = [1, 2].map(|n| dir.path().join(format!("m-0000{n}-of-00002.gguf")));
    fs::write(&paths[0], copy(&whole, |_| true, |_| true, |writer| first.put(writer), &[])).unwrap();
    fs::write(&paths[1], copy(&whole, |_| false, |_| false, |writer| second.put(writer), &head)).unwrap();
    let gguf = Gguf::open(&paths[0]).unwrap();
    assert!(!Config::from_gguf(&gguf).unwrap().tied_embeddings);
    assert_eq!(gguf.tensor("output.weight").unwrap().data(), other);
    assert_eq!(gguf.tensor("output.weight").unwrap().info.shard, 1);
    // What it computes is what one file with that head does, and not what the embedding would give.
    let one_file = Gguf::parse(&copy(&whole, |_| true, |_| true, |_| (), &head)).unwrap();
    let found = logits(gguf);
    assert_eq!(found, logits(one_file));
    assert_ne!(found, logits(golden("llama")));
}
