//! SentencePiece: of all neighbouring pairs whose union is a token, merge the one that scores
//! highest, until none is left; characters without a token become bytes.
//!
//! This is no list of ranked merges (unions may tie, and then the leftmost wins), so the BPE of the
//! `tokenizers` crate cannot stand in for it.
//!
//! Source: Kudo and Richardson 2018, arXiv:1808.06226; order and ties as in llama.cpp.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::vocab::{TokenType, Vocab};

/// What SentencePiece writes for a space.
pub(super) const SPACE: &str = "▁";

pub(super) struct Spm {
    ids: HashMap<Box<str>, u32>,
    scores: Vec<f32>,
    /// The token of each byte.
    bytes: [Option<u32>; 256],
    unk: Option<u32>,
}

/// A stretch of the text on its way to become a token. A merged-away symbol has `end == start`.
struct Symbol {
    start: usize,
    end: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

/// A candidate: two neighbours whose union is a token.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Length of the union in bytes. A candidate is stale once its symbols have grown.
    n_bytes: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Pair) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Pair) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Pair) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

impl Spm {
    pub(super) fn new(vocab: &Vocab, scores: &[f32]) -> Spm {
        let mut bytes = [None; 256];
        for ((id, text), ty) in (0u32..).zip(&vocab.tokens).zip(&vocab.types) {
            if let Some(byte) = byte_value(text).filter(|_| *ty == TokenType::Byte) {
                bytes[usize::from(byte)] = Some(id);
            }
        }
        let ids = vocab.mergeable().map(|(id, text)| (text.into(), id)).collect();
        Spm { ids, scores: scores.to_vec(), bytes, unk: vocab.unk }
    }

    pub(super) fn encode(&self, text: &str, space_prefix: bool, ids: &mut Vec<u32>) {
        let prefix = if space_prefix { SPACE } else { "" };
        let text = format!("{prefix}{}", text.replace(' ', SPACE));
        let mut symbols = split_chars(&text);
        self.merge(&text, &mut symbols);
        for symbol in symbols.iter().filter(|symbol| symbol.start < symbol.end) {
            self.emit(&text[symbol.start..symbol.end], ids);
        }
    }

    fn merge(&self, text: &str, symbols: &mut [Symbol]) {
        let mut queue: BinaryHeap<Pair> =
            (1..symbols.len()).filter_map(|right| self.candidate(text, symbols, right - 1, right)).collect();
        while let Some(Pair { left, right, n_bytes, .. }) = queue.pop() {
            let (start, end) = (symbols[left].start, symbols[right].end);
            let live = [left, right].iter().all(|&at| symbols[at].start < symbols[at].end);
            if !live || end - start != n_bytes {
                continue;
            }
            let next = symbols[right].next;
            symbols[right].end = symbols[right].start;
            symbols[left].end = end;
            symbols[left].next = next;
            if let Some(next) = next {
                symbols[next].prev = Some(left);
                queue.extend(self.candidate(text, symbols, left, next));
            }
            if let Some(prev) = symbols[left].prev {
                queue.extend(self.candidate(text, symbols, prev, left));
            }
        }
    }

    fn candidate(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Pair> {
        let (start, end) = (symbols[left].start, symbols[right].end);
        let id = *self.ids.get(&text[start..end])?;
        Some(Pair { score: self.scores[id as usize], left, right, n_bytes: end - start })
    }

    fn emit(&self, piece: &str, ids: &mut Vec<u32>) {
        match self.ids.get(piece) {
            Some(&id) => ids.push(id),
            None => ids.extend(piece.bytes().filter_map(|byte| self.bytes[usize::from(byte)].or(self.unk))),
        }
    }
}

fn split_chars(text: &str) -> Vec<Symbol> {
    let mut symbols: Vec<Symbol> = text
        .char_indices()
        .enumerate()
        .map(|(i, (start, c))| Symbol { start, end: start + c.len_utf8(), prev: i.checked_sub(1), next: Some(i + 1) })
        .collect();
    if let Some(last) = symbols.last_mut() {
        last.next = None;
    }
    symbols
}

/// The byte that a byte token such as `<0x0A>` stands for.
pub(super) fn byte_value(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_tokens_are_two_hex_digits() {
        assert_eq!(byte_value("<0x0A>"), Some(10));
        assert_eq!(byte_value("<0xFF>"), Some(255));
        for wrong in ["<0x>", "<0x100>", "<0xG0>", "0x0A", "<0x0A"] {
            assert_eq!(byte_value(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn equal_scores_merge_from_the_left() {
        let ids = [("a", 0), ("aa", 1)].map(|(text, id)| (text.into(), id)).into_iter().collect();
        let spm = Spm { ids, scores: vec![0.0; 2], bytes: [None; 256], unk: Some(7) };
        let mut out = Vec::new();
        spm.encode("aaab", false, &mut out);
        assert_eq!(out, [1, 0, 7]);
    }
}
