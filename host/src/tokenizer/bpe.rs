//! Byte-level BPE: words become characters of a byte alphabet, which the `tokenizers` crate merges,
//! lowest rank first.
//!
//! Source: Sennrich et al. 2016, arXiv:1508.07909; the byte alphabet is GPT-2's `bytes_to_unicode`.

use tokenizers::Model as _;
use tokenizers::models::bpe;

use super::pretokenize::Pretokenizer;
use super::vocab::{TokenizerError, Vocab};

pub(super) struct Bpe {
    merger: bpe::BPE,
    pre: Pretokenizer,
    alphabet: [char; 256],
}

impl Bpe {
    pub(super) fn new(vocab: &Vocab, pre: Pretokenizer, merges: &[String]) -> Result<Bpe, TokenizerError> {
        let ids: bpe::Vocab = vocab.mergeable().map(|(id, text)| (text.to_owned(), id)).collect();
        let mut pairs = Vec::with_capacity(merges.len());
        let mut union = String::new();
        for (index, merge) in merges.iter().enumerate() {
            let (left, right) = split_merge(merge).ok_or(TokenizerError::Merge { index })?;
            union.clear();
            union.extend([left, right]);
            // A merge of or into something that is no token cannot happen; the builder would refuse it.
            if [left, right, &union].into_iter().all(|text| ids.contains_key(text)) {
                pairs.push((left.to_owned(), right.to_owned()));
            }
        }
        let merger = bpe::BPE::builder()
            .vocab_and_merges(ids, pairs)
            .ignore_merges(pre.ignores_merges())
            .build()
            .map_err(|error| TokenizerError::Build(error.to_string()))?;
        Ok(Bpe { merger, pre, alphabet: byte_alphabet() })
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut letters = String::new();
        for word in self.pre.split(text) {
            letters.clear();
            letters.extend(word.bytes().map(|byte| self.alphabet[usize::from(byte)]));
            let tokens =
                self.merger.tokenize(&letters).expect("fails only for want of an unknown token, and none is set");
            ids.extend(tokens.iter().map(|token| token.id));
        }
    }
}

/// The parts of a merge. The first may be a space itself, so the search starts after one character.
fn split_merge(merge: &str) -> Option<(&str, &str)> {
    let first = merge.chars().next()?.len_utf8();
    let space = first + merge[first..].find(' ')?;
    Some((&merge[..space], &merge[space + 1..]))
}

/// The character that stands for each byte: itself if it is printable and no space, otherwise one
/// from U+0100 on, in order.
pub(super) fn byte_alphabet() -> [char; 256] {
    let mut next = 0x100..;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { Some(byte as u32) } else { next.next() };
        code.and_then(char::from_u32).expect("below U+0144 every number is a character")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_is_gpt2s() {
        let alphabet = byte_alphabet();
        assert_eq!(alphabet[usize::from(b' ')], 'Ġ');
        assert_eq!(alphabet[usize::from(b'\n')], 'Ċ');
        assert_eq!(alphabet[usize::from(b'A')], 'A');
        assert_eq!(alphabet[0xad], '\u{143}');
        let distinct: std::collections::HashSet<char> = alphabet.into_iter().collect();
        assert_eq!(distinct.len(), 256);
    }

    #[test]
    fn merges_split_at_the_first_space_that_is_not_a_part() {
        assert_eq!(split_merge("a b"), Some(("a", "b")));
        assert_eq!(split_merge("  b"), Some((" ", "b")));
        assert_eq!(split_merge("Ġ Ġt"), Some(("Ġ", "Ġt")));
        assert_eq!(split_merge("ab"), None);
        assert_eq!(split_merge(""), None);
    }
}
