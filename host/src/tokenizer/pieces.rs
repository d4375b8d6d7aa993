//! The bytes of every token, in one buffer.

use std::collections::HashMap;

use super::bpe::byte_alphabet;
use super::spm::{SPACE, byte_value};
use super::vocab::{TokenType, Vocab, VocabKind};

pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// Where each token's bytes end in `bytes`, and whether they are shown.
    ends: Vec<(usize, bool)>,
}

impl Pieces {
    pub(super) fn new(vocab: &Vocab) -> Pieces {
        let letters: HashMap<char, u8> = byte_alphabet().into_iter().zip(0..=u8::MAX).collect();
        let mut pieces = Pieces { bytes: Vec::new(), ends: Vec::with_capacity(vocab.tokens.len()) };
        for (text, &ty) in vocab.tokens.iter().zip(&vocab.types) {
            match (&vocab.kind, ty) {
                (VocabKind::Bpe { .. }, TokenType::Normal) => pieces.push_letters(text, &letters),
                (VocabKind::Spm { .. }, TokenType::Normal | TokenType::UserDefined) => {
                    pieces.bytes.extend(text.replace(SPACE, " ").as_bytes());
                }
                (VocabKind::Spm { .. }, TokenType::Byte) => pieces.bytes.extend(byte_value(text)),
                _ => pieces.bytes.extend(text.as_bytes()),
            }
            let shown = matches!(ty, TokenType::Normal | TokenType::UserDefined | TokenType::Byte);
            pieces.ends.push((pieces.bytes.len(), shown));
        }
        pieces
    }

    /// Appends a text in the byte alphabet. Characters outside of it stand for themselves.
    fn push_letters(&mut self, text: &str, letters: &HashMap<char, u8>) {
        for c in text.chars() {
            match letters.get(&c) {
                Some(&byte) => self.bytes.push(byte),
                None => self.bytes.extend(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
    }

    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.ends.len()).expect("the vocabulary was checked to have u32 ids")
    }

    /// The bytes of token `id`; empty for hidden ones unless asked for, and for ids beyond the end.
    pub(super) fn bytes(&self, id: u32, hidden: bool) -> &[u8] {
        let id = id as usize;
        match self.ends.get(id) {
            Some(&(end, shown)) if shown || hidden => {
                let start = id.checked_sub(1).map_or(0, |before| self.ends[before].0);
                &self.bytes[start..end]
            }
            _ => &[],
        }
    }
}
