//! Tokens that are matched as whole texts before anything else, and those that end generation.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};

use super::vocab::{TokenType, TokenizerError, Vocab};

/// Tokens that end generation wherever a vocabulary has them, whatever else the file says.
/// Source: llama.cpp's list, which grew from models whose metadata named only one of theirs.
const END_OF_GENERATION: [&str; 26] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<eos>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<｜end▁of▁sentence｜>",
    "<fim-pad>",
];

pub(super) struct Special {
    /// What template text may contain: all special tokens.
    trusted: Finder,
    /// What anybody's text may contain.
    untrusted: Finder,
    /// The difference.
    control_texts: Vec<String>,
    ids: HashMap<String, u32>,
    eog: HashSet<u32>,
}

/// Finds token texts, leftmost first and then the longest.
struct Finder {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

impl Finder {
    fn new(tokens: &[(u32, &str)]) -> Result<Finder, TokenizerError> {
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, text)| text))
            .map_err(|error| TokenizerError::Build(error.to_string()))?;
        Ok(Finder { automaton, ids: tokens.iter().map(|(id, _)| *id).collect() })
    }
}

/// Some files mark tokens that end generation as text. They are control tokens nevertheless.
pub(super) fn mark_end_of_generation(vocab: &mut Vocab) {
    for (text, ty) in vocab.tokens.iter().zip(&mut vocab.types) {
        if END_OF_GENERATION.contains(&text.as_str()) && *ty != TokenType::Unknown {
            *ty = TokenType::Control;
        }
    }
}

/// Whether only trusted text may contain the token.
fn is_control(text: &str, ty: TokenType) -> bool {
    match ty {
        TokenType::Control | TokenType::Unknown => true,
        TokenType::UserDefined => text.starts_with("<|") && text.ends_with("|>"),
        TokenType::Normal | TokenType::Unused | TokenType::Byte => false,
    }
}

impl Special {
    pub(super) fn new(vocab: &Vocab) -> Result<Special, TokenizerError> {
        let (mut all, mut open, mut control_texts) = (Vec::new(), Vec::new(), Vec::new());
        for ((id, text), ty) in (0u32..).zip(&vocab.tokens).zip(&vocab.types) {
            let control = is_control(text, *ty);
            // An empty text would match everywhere.
            if text.is_empty() || !(control || *ty == TokenType::UserDefined) {
                continue;
            }
            all.push((id, text.as_str()));
            match control {
                true => control_texts.push(text.clone()),
                false => open.push((id, text.as_str())),
            }
        }
        Ok(Special {
            trusted: Finder::new(&all)?,
            untrusted: Finder::new(&open)?,
            control_texts,
            ids: all.iter().map(|(id, text)| ((*text).to_owned(), *id)).collect(),
            eog: end_of_generation(vocab),
        })
    }

    /// The special tokens in `text` and where they are.
    pub(super) fn find(&self, text: &str, trusted: bool) -> impl Iterator<Item = (u32, Range<usize>)> {
        let finder = if trusted { &self.trusted } else { &self.untrusted };
        finder.automaton.find_iter(text).map(|found| (finder.ids[found.pattern().as_usize()], found.range()))
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    pub(super) fn control_texts(&self) -> impl Iterator<Item = &str> {
        self.control_texts.iter().map(String::as_str)
    }

    pub(super) fn is_eog(&self, id: u32) -> bool {
        self.eog.contains(&id)
    }
}

fn end_of_generation(vocab: &Vocab) -> HashSet<u32> {
    let by_text = |wanted: &str| (0u32..).zip(&vocab.tokens).find(|(_, text)| *text == wanted).map(|(id, _)| id);
    let listed = (0u32..).zip(&vocab.tokens).filter(|(_, text)| END_OF_GENERATION.contains(&text.as_str()));
    let mut eog: HashSet<u32> = listed.map(|(id, _)| id).collect();
    // In the harmony format <|end|> ends one message of a reply, and <|return|> or <|call|> the reply.
    if by_text("<|return|>").is_some() && by_text("<|call|>").is_some() {
        eog.retain(|&id| by_text("<|end|>") != Some(id));
    }
    eog.extend(vocab.eos);
    eog.extend(&vocab.eot);
    eog
}
