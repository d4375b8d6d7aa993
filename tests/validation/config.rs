//! Model shapes from GGUF metadata.

use std::path::{Path, PathBuf};

use host::gguf::Gguf;
use host::model::config::{Arch, Config};

fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

#[test]
fn golden_models_have_a_config() {
    for arch in ["gpt-oss", "llama", "qwen2", "qwen3", "qwen35moe", "qwen3moe"] {
        let gguf = Gguf::open(&repo(&format!("tests/data/logits/{arch}-tiny.gguf"))).unwrap();
        let config = Config::from_gguf(&gguf).unwrap();
        println!("{config:#?}");
        assert_eq!(config.arch, Arch::from_name(arch).unwrap());
        assert_eq!(config.n_vocab, 512);
    }
}
