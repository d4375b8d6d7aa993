//! Vocabularies that are spoilt.

use host::gguf::{Gguf, Value, Writer};
use host::tokenizer::{Tokenizer, TokenizerError};

use super::{PLAIN, SPECIAL};

/// A byte-level vocabulary of five tokens, to be spoilt: `<|end|>` (control), a, b, ab, c.
pub(super) struct TinyVocab {
    pub(super) pre: &'static str,
    pub(super) tokens: Vec<String>,
    pub(super) types: Option<Vec<i32>>,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) add_bos: Option<bool>,
}

impl Default for TinyVocab {
    fn default() -> TinyVocab {
        let tokens = ["<|end|>", "a", "b", "ab", "c"].map(String::from).to_vec();
        TinyVocab { pre: "qwen2", tokens, types: None, bos: None, eos: None, add_bos: None }
    }
}

impl TinyVocab {
    pub(super) fn writer(&self) -> Writer {
        let mut writer = Writer::new();
        writer.put_str("tokenizer.ggml.model", "gpt2");
        writer.put_str("tokenizer.ggml.pre", self.pre);
        writer.put_strings("tokenizer.ggml.tokens", &self.tokens);
        writer.put_strings("tokenizer.ggml.merges", &["a b"]);
        let mut types = vec![1; self.tokens.len()];
        types[0] = 3;
        writer.put_i32s("tokenizer.ggml.token_type", self.types.as_ref().unwrap_or(&types));
        let mut id = |key, id: Option<u32>| id.into_iter().for_each(|id| writer.put(key, Value::U32(id)));
        id("tokenizer.ggml.bos_token_id", self.bos);
        id("tokenizer.ggml.eos_token_id", self.eos);
        if let Some(add_bos) = self.add_bos {
            writer.put("tokenizer.ggml.add_bos_token", Value::Bool(add_bos));
        }
        writer
    }

    pub(super) fn load(&self) -> Result<Tokenizer, TokenizerError> {
        load(self.writer())
    }
}

pub(super) fn load(writer: Writer) -> Result<Tokenizer, TokenizerError> {
    let layout = writer.layout();
    Tokenizer::from_gguf(&Gguf::parse(&layout.header).expect("a valid file"))
}

#[test]
fn b17_ids_without_text_are_empty() {
    let tokenizer = TinyVocab::default().load().expect("loads");
    for id in [5, 310, u32::MAX] {
        assert_eq!(tokenizer.token_bytes(id), b"");
        assert_eq!(tokenizer.token_bytes_special(id), b"");
    }
    assert_eq!(tokenizer.token_bytes(0), b"", "control tokens are not shown");
    assert_eq!(tokenizer.token_bytes_special(0), b"<|end|>");
    assert_eq!(tokenizer.decode(&[3, 310, 0, 4], false), "abc");
}

#[test]
fn b17_wild_ids_are_refused() {
    for id in [5, u32::MAX] {
        let vocab = TinyVocab { eos: Some(id), ..TinyVocab::default() };
        let error = vocab.load().expect_err("an id beyond the vocabulary").to_string();
        assert!(error.contains("tokenizer.ggml.eos_token_id") && error.contains(&id.to_string()), "{error}");
    }
}

#[test]
fn b17_per_token_arrays_must_fit() {
    let short = TinyVocab { types: Some(vec![1, 1]), ..TinyVocab::default() };
    let error = short.load().expect_err("a short array").to_string();
    assert!(error.contains("tokenizer.ggml.token_type") && error.contains('2'), "{error}");

    let wild = TinyVocab { types: Some(vec![1, 1, 1, 1, 77]), ..TinyVocab::default() };
    assert!(matches!(wild.load(), Err(TokenizerError::Type { id: 4, value: 77 })));

    let spm = |scores: &[f32]| {
        let mut writer = Writer::new();
        writer.put_str("tokenizer.ggml.model", "llama");
        writer.put_strings("tokenizer.ggml.tokens", &["<unk>", "a", "b"]);
        writer.put_f32s("tokenizer.ggml.scores", scores);
        load(writer)
    };
    let error = spm(&[0.0]).expect_err("a short array").to_string();
    assert!(error.contains("tokenizer.ggml.scores"), "{error}");
    // NaN orders somehow, and an unknown character is the unknown token.
    let ids = spm(&[f32::NAN; 3]).expect("loads").encode("abz", PLAIN);
    assert_eq!(ids, [0, 0, 0, 1, 2, 0]);
}

#[test]
fn b17_element_types_must_fit() {
    // A file whose token_type is an array of u8, which is taken from another file's pair.
    let mut bytes = TinyVocab::default().writer().layout().header;
    let key = b"tokenizer.ggml.token_type";
    let at = bytes.windows(key.len()).position(|window| window == key).expect("the key") + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&0u32.to_le_bytes());
    let n_elems_end = at + 12;
    bytes.drain(n_elems_end + 5..n_elems_end + 20);
    let gguf = Gguf::parse(&bytes).expect("still a valid file");
    let error = Tokenizer::from_gguf(&gguf).expect_err("bytes are no types").to_string();
    assert!(error.contains("tokenizer.ggml.token_type"), "{error}");
}

#[test]
fn b17_equal_tokens_and_missing_bos_are_no_reason_to_stop() {
    let mut vocab = TinyVocab { add_bos: Some(true), ..TinyVocab::default() };
    vocab.tokens.push("a".into());
    let tokenizer = vocab.load().expect("loads");
    assert!(!tokenizer.add_bos());
    let ids = tokenizer.encode("ac", SPECIAL);
    assert_eq!(tokenizer.decode(&ids, false), "ac");
}

#[test]
fn a_model_without_vocabulary_says_so() {
    let mut writer = Writer::new();
    writer.put_str("tokenizer.ggml.model", "none");
    assert!(matches!(load(writer), Err(TokenizerError::NoVocabulary)));
    let mut writer = Writer::new();
    writer.put_str("tokenizer.ggml.model", "t5");
    assert!(matches!(load(writer), Err(TokenizerError::Model(name)) if name == "t5"));
}
