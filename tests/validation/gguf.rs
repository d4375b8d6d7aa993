//! GGUF files.

use std::path::{Path, PathBuf};

use host::gguf::Gguf;

fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Files from other writers: the golden models and the real one.
#[test]
fn foreign_files_open() {
    let mut files = vec![repo("models/zinc-tiny-qwen35moe.gguf")];
    for arch in ["gpt-oss", "llama", "qwen2", "qwen3", "qwen35moe", "qwen3moe"] {
        files.push(repo(&format!("tests/data/logits/{arch}-tiny.gguf")));
    }
    for file in files {
        let gguf = Gguf::open(&file).unwrap();
        let embd = gguf.tensor("token_embd.weight").unwrap();
        assert_eq!(embd.data().len(), embd.rows() * embd.row_bytes());
        let stem = file.file_name().unwrap().to_str().unwrap();
        assert!(stem.contains(gguf.arch().unwrap()));
    }
}
