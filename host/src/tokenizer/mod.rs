//! Text to token ids and back, as the model's GGUF metadata says.
//!
//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`) runs the merges of the `tokenizers` crate over
//! the words that the model's own pre-tokeniser makes (`pretokenize`). SentencePiece models
//! (`llama`) merge by score, which that crate cannot express; `spm` does it. Both give the ids of
//! llama.cpp. Text is taken as it is: no NFC or other normalisation, as in llama.cpp, while Hugging
//! Face's Qwen tokenizers apply NFC first (`e` + U+0301 is one id there and two here).
//!
//! Special tokens are matched before anything else. Which ones depends on who wrote the text:
//!
//! | token type | template text (`special: true`) | anyone's text (`special: false`) |
//! |---|---|---|
//! | control, unknown | matched | plain text |
//! | user-defined, `<|…|>` | matched | plain text |
//! | user-defined, other | matched | matched |
//!
//! Control tokens take no part in merging either, so plain text can never become one.

mod bpe;
mod pieces;
mod pretokenize;
mod special;
mod spm;
mod stream;
mod vocab;

use std::sync::Arc;

pub use pretokenize::Pretokenizer;
pub use stream::TokenStream;
pub use vocab::{TokenType, TokenizerError, Vocab, VocabKind};

use crate::gguf::Gguf;
use bpe::Bpe;
use pieces::Pieces;
use special::Special;
use spm::Spm;

/// How to encode a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Encode {
    /// Start with the BOS token if the model's rule says so.
    pub bos: bool,
    /// Match control tokens in the text. Only for text that nobody else wrote.
    pub special: bool,
}

/// A stretch of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    /// The text.
    pub text: &'a str,
    /// Whether control tokens are matched in it.
    pub special: bool,
}

/// A model's vocabulary, ready to encode and decode. Clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    algorithm: Algorithm,
    special: Special,
    pieces: Pieces,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    add_space_prefix: bool,
}

enum Algorithm {
    Bpe(Box<Bpe>),
    Spm(Box<Spm>),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.inner.algorithm {
            Algorithm::Bpe(_) => "bpe",
            Algorithm::Spm(_) => "spm",
        };
        f.debug_struct("Tokenizer").field("kind", &kind).field("n_vocab", &self.n_vocab()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads the vocabulary of a model.
    ///
    /// # Errors
    /// [`TokenizerError::NoVocabulary`] if the file has none, which callers that need no text may
    /// accept; otherwise which key is wrong and how.
    pub fn from_gguf(gguf: &Gguf) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::new(Vocab::from_gguf(gguf)?)
    }

    /// Builds a tokenizer from its parts.
    ///
    /// # Errors
    /// If the parts contradict each other; see [`TokenizerError`].
    pub fn new(mut vocab: Vocab) -> Result<Tokenizer, TokenizerError> {
        vocab.check()?;
        special::mark_end_of_generation(&mut vocab);
        let special = Special::new(&vocab)?;
        let algorithm = match &vocab.kind {
            VocabKind::Bpe { pre, merges } => Algorithm::Bpe(Box::new(Bpe::new(&vocab, *pre, merges)?)),
            VocabKind::Spm { scores } => Algorithm::Spm(Box::new(Spm::new(&vocab, scores))),
        };
        if vocab.add_bos && vocab.bos.is_none() {
            tracing::warn!("the model asks for a BOS token and names none: prompts start without one");
        }
        let inner = Inner {
            algorithm,
            special,
            pieces: Pieces::new(&vocab),
            bos: vocab.bos,
            eos: vocab.eos,
            add_bos: vocab.add_bos && vocab.bos.is_some(),
            add_space_prefix: vocab.add_space_prefix,
        };
        Ok(Tokenizer { inner: Arc::new(inner) })
    }

    /// Number of tokens with a text. A model's head may have more rows.
    pub fn n_vocab(&self) -> u32 {
        self.inner.pieces.len()
    }

    /// The token that starts a text.
    pub fn bos(&self) -> Option<u32> {
        self.inner.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.inner.eos
    }

    /// Whether a prompt starts with [`Tokenizer::bos`].
    pub fn add_bos(&self) -> bool {
        self.inner.add_bos
    }

    /// Whether generation ends with this token.
    pub fn is_eog(&self, id: u32) -> bool {
        self.inner.special.is_eog(id)
    }

    /// The id of a special token by its text, such as `<|im_end|>`.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        self.inner.special.id(text)
    }

    /// The texts that become special tokens where `special` is on, and only there.
    pub fn control_texts(&self) -> impl Iterator<Item = &str> {
        self.inner.special.control_texts()
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str, opts: Encode) -> Vec<u32> {
        self.encode_parts(&[Segment { text, special: opts.special }], opts.bos)
    }

    /// The ids of a prompt made of stretches with different trust, such as a rendered chat. The
    /// stretches are one text: words and merges run across their borders, special tokens do not.
    /// Starts with exactly one BOS if the model's rule or the text itself asks for it.
    pub fn encode_segments(&self, segments: &[Segment<'_>]) -> Vec<u32> {
        self.encode_parts(segments, true)
    }

    fn encode_parts(&self, parts: &[Segment<'_>], bos: bool) -> Vec<u32> {
        let joined: String;
        let text = match parts {
            [only] => only.text,
            _ => {
                joined = parts.iter().map(|part| part.text).collect();
                &joined
            }
        };
        let mut ids = Vec::with_capacity(text.len() / 4 + 2);
        let (mut raw_start, mut part_start) = (0, 0);
        for part in parts {
            for (id, span) in self.inner.special.find(part.text, part.special) {
                self.encode_raw(&text[raw_start..part_start + span.start], &mut ids);
                ids.push(id);
                raw_start = part_start + span.end;
            }
            part_start += part.text.len();
        }
        self.encode_raw(&text[raw_start..], &mut ids);
        // A template may print the BOS token itself; then there is one already.
        if let Some(id) = self.inner.bos.filter(|id| bos && self.inner.add_bos && ids.first() != Some(id)) {
            ids.insert(0, id);
        }
        ids
    }

    /// Encodes a stretch without special tokens; it starts the text or follows a special token.
    fn encode_raw(&self, text: &str, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        match &self.inner.algorithm {
            Algorithm::Bpe(bpe) => bpe.encode(text, ids),
            Algorithm::Spm(spm) => spm.encode(text, self.inner.add_space_prefix, ids),
        }
    }

    /// The bytes of a token as they are shown. Empty for control tokens and for ids without a text
    /// (rows that pad the head). A character may be spread over several tokens.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.inner.pieces.bytes(id, false)
    }

    /// As [`Tokenizer::token_bytes`], with the text of control tokens.
    pub fn token_bytes_special(&self, id: u32) -> &[u8] {
        self.inner.pieces.bytes(id, true)
    }

    /// The text of `ids`, with control tokens shown if `special`. Bytes that are not UTF-8 become
    /// U+FFFD. The space that a SentencePiece model puts before the first word is left out.
    pub fn decode(&self, ids: &[u32], special: bool) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.inner.pieces.bytes(id, special)).copied().collect();
        let shown = match &self.inner.algorithm {
            Algorithm::Spm(_) if self.inner.add_space_prefix => bytes.strip_prefix(b" ").unwrap_or(&bytes),
            _ => &bytes,
        };
        String::from_utf8_lossy(shown).into_owned()
    }

    /// Starts decoding tokens one at a time, with control tokens left out.
    pub fn stream(&self) -> TokenStream {
        TokenStream::new(self.clone(), false)
    }

    /// As [`Tokenizer::stream`], with the text of control tokens.
    pub fn stream_special(&self) -> TokenStream {
        TokenStream::new(self.clone(), true)
    }
}
