//! Splitting text into the words that BPE merges within: one rule a family of models, by the name in
//! `tokenizer.ggml.pre`. The wrong rule still decodes correctly and quietly costs quality, so an
//! unknown name is an error.
//!
//! The published rules end in `\s+(?!\S)|\s+`: of several spaces before a word, the last belongs to
//! the word. Engines with look-ahead backtrack and give up after a million steps, which a long run of
//! spaces takes (the `Split` of the `tokenizers` crate then stops splitting without an error). So
//! that one rule is code here (`Pretokenizer::trim`), and the rest is regular and takes linear time.
//!
//! Source: the `pre_tokenizer` of each family's published `tokenizer.json`; which name means which
//! rule is llama.cpp's.

use std::ops::Range;
use std::sync::OnceLock;

use regex::Regex;

/// A rule for splitting text into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pretokenizer {
    /// GPT-2.
    Gpt2,
    /// Digits one by one, then as GPT-2: SmolLM, StarCoder.
    Smollm,
    /// Llama 3: digits in threes.
    Llama3,
    /// Qwen 2 and 3: digits one by one; combining marks are punctuation.
    Qwen2,
    /// Qwen 3.5: as Qwen 2, but combining marks are part of words.
    Qwen35,
    /// GPT-4o, gpt-oss, Llama 4: words also split where lower case meets upper case.
    Gpt4o,
}

/// Names in `tokenizer.ggml.pre` that mean each rule.
const NAMES: [(Pretokenizer, &[&str]); 6] = [
    (Pretokenizer::Gpt2, &["gpt-2", "phi-2", "gigachat", "mellum", "exaone4", "a.x-4.0"]),
    (Pretokenizer::Smollm, &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"]),
    (Pretokenizer::Llama3, &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"]),
    (Pretokenizer::Qwen2, &["qwen2", "deepseek-r1-qwen", "kormo", "megrez"]),
    (Pretokenizer::Qwen35, &["qwen35"]),
    (Pretokenizer::Gpt4o, &["gpt-4o", "llama4", "kanana2"]),
];

impl Pretokenizer {
    /// The rule that `name` in `tokenizer.ggml.pre` means.
    pub fn from_name(name: &str) -> Option<Pretokenizer> {
        NAMES.iter().find(|(_, names)| names.contains(&name)).map(|(rule, _)| *rule)
    }

    /// All known names, for messages.
    pub(super) fn names() -> String {
        let names: Vec<&str> = NAMES.iter().flat_map(|(_, names)| *names).copied().collect();
        names.join(", ")
    }

    /// Whether models of this family start with BOS if the file does not say.
    pub(super) fn adds_bos(self) -> bool {
        self == Pretokenizer::Llama3
    }

    /// Whether a word that is a token is taken whole, whatever the merges would make of it.
    pub(super) fn ignores_merges(self) -> bool {
        self == Pretokenizer::Llama3
    }

    /// The words of `text`, in order and without gaps.
    pub fn split(self, text: &str) -> Vec<&str> {
        self.regexes().iter().fold(vec![text], |pieces, regex| {
            let mut words = Vec::with_capacity(pieces.len());
            pieces.into_iter().for_each(|piece| self.split_piece(regex, piece, &mut words));
            words
        })
    }

    /// Matches are words, and so is what lies between them.
    fn split_piece<'a>(self, regex: &Regex, piece: &'a str, words: &mut Vec<&'a str>) {
        let mut end = 0;
        while let Some(found) = regex.find_at(piece, end) {
            if end < found.start() {
                words.push(&piece[end..found.start()]);
            }
            let word = &piece[found.start()..self.trim(piece, found.range())];
            words.push(word);
            end = found.start() + word.len();
        }
        if end < piece.len() {
            words.push(&piece[end..]);
        }
    }

    /// Where the match really ends: a run of spaces leaves its last one to the word that follows.
    fn trim(self, piece: &str, found: Range<usize>) -> usize {
        let last = piece[found.clone()].char_indices().next_back();
        match last {
            Some((at, c)) if at > 0 && found.end < piece.len() && c.is_whitespace() && !self.keeps(c) => {
                found.start + at
            }
            _ => found.end,
        }
    }

    /// Whether a run that ends in this space is a word as it is.
    fn keeps(self, c: char) -> bool {
        matches!(c, '\r' | '\n') && !matches!(self, Pretokenizer::Gpt2 | Pretokenizer::Smollm)
    }

    /// The rule as regular expressions, each applied to the pieces that the one before made.
    fn regexes(self) -> &'static [Regex] {
        static REGEXES: [OnceLock<Vec<Regex>>; NAMES.len()] = [const { OnceLock::new() }; NAMES.len()];
        let compile = |pattern: String| Regex::new(&pattern).expect("the tests compile every pattern");
        REGEXES[self as usize].get_or_init(|| self.patterns().into_iter().map(compile).collect())
    }

    fn patterns(self) -> Vec<String> {
        const CONTRACTION: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
        const SPACES: &str = r"\s*[\r\n]+|\s+";
        const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
        let word = |letters: &str, digits: &str, symbols: &str| {
            format!(r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?{symbols}+[\r\n]*|{SPACES}")
        };
        match self {
            Pretokenizer::Gpt2 => vec![GPT2.to_owned()],
            Pretokenizer::Smollm => vec![r"\p{N}".to_owned(), GPT2.to_owned()],
            Pretokenizer::Llama3 => vec![word(r"\p{L}", r"\p{N}{1,3}", r"[^\s\p{L}\p{N}]")],
            Pretokenizer::Qwen2 => vec![word(r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]")],
            Pretokenizer::Qwen35 => vec![word(r"[\p{L}\p{M}]", r"\p{N}", r"[^\s\p{L}\p{M}\p{N}]")],
            Pretokenizer::Gpt4o => {
                let (upper, lower) = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]");
                let cased = |first: &str, rest: &str| format!(r"[^\r\n\p{{L}}\p{{N}}]?{first}{rest}{CONTRACTION}?");
                let (small, large) = (
                    cased(&format!("{upper}*"), &format!("{lower}+")),
                    cased(&format!("{upper}+"), &format!("{lower}*")),
                );
                vec![format!(r"{small}|{large}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}")]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_a_rule_that_keeps_the_text() {
        let text = "I'LL say  'x12345'\r\n\r\n\tfooBar नमस्ते e\u{301}a ½ 日本 \u{a0} ";
        for (rule, names) in NAMES {
            let words = rule.split(text);
            assert_eq!(words.concat(), text, "{rule:?}");
            assert!(words.iter().all(|word| !word.is_empty()), "{rule:?}: {words:?}");
            assert!(names.iter().all(|name| Pretokenizer::from_name(name) == Some(rule)));
        }
        assert_eq!(Pretokenizer::from_name("default"), None);
        assert_eq!(Pretokenizer::from_name(""), None);
    }

    #[test]
    fn gpt4o_splits_at_case_and_keeps_contractions() {
        let split = |text| Pretokenizer::Gpt4o.split(text);
        assert_eq!(split("HelloWorld fooBar"), ["Hello", "World", " foo", "Bar"]);
        assert_eq!(split("12345"), ["123", "45"]);
        assert_eq!(split("you'LL/\n"), ["you'LL", "/\n"]);
    }

    #[test]
    fn the_last_space_belongs_to_the_word() {
        let split = |rule: Pretokenizer, text| rule.split(text);
        assert_eq!(split(Pretokenizer::Gpt2, "a   b \n c  "), ["a", "  ", " b", " \n", " c", "  "]);
        assert_eq!(split(Pretokenizer::Gpt2, "\n\nx"), ["\n", "\n", "x"]);
        assert_eq!(split(Pretokenizer::Smollm, "a  5"), ["a", "  ", "5"]);
        assert_eq!(split(Pretokenizer::Qwen2, "a   b \n\n  c  "), ["a", "  ", " b", " \n\n", " ", " c", "  "]);
        assert_eq!(split(Pretokenizer::Qwen2, "\u{3000}\u{a0} 5"), ["\u{3000}\u{a0}", " ", "5"]);
    }

    #[test]
    fn runs_of_millions_are_not_cut() {
        let n = 3_000_000;
        let text = [" ".repeat(n), "x".repeat(n), "X".repeat(n), "!".repeat(n), "\n".repeat(n)].concat();
        for (rule, _) in NAMES {
            let words = rule.split(&text);
            assert_eq!(words.iter().map(|word| word.len()).sum::<usize>(), text.len(), "{rule:?}");
            assert!((3..6).contains(&words.len()), "{rule:?}: {} words", words.len());
        }
    }
}
