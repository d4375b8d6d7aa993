//! Keeping what people typed apart from what the template wrote, through the template.
//!
//! A template pastes messages between its control tokens and may strip, split and search them first,
//! so quotes around a message would not survive. Instead characters are exchanged one for one before
//! rendering: a character that occurs in the text of some control token gets an alias, a private-use
//! character that occurs nowhere else. In the rendered prompt an alias is untrusted text for certain,
//! whatever the template did to it, and no control token can be made of aliases, nor of aliases and
//! template text. Afterwards aliases turn back, and their runs become segments in which control
//! tokens are not matched.
//!
//! It is done twice. Exchanging every such character is the safe way, but the template no longer
//! finds its own tags (`</think>`) in a message, nor does the tokenizer find tokens that anyone may
//! write. Exchanging only whole control texts keeps both, but a template that cuts and joins could
//! still make a control token of what is left. So the second rendering is used if both have the same
//! sequence of control tokens, which then are the template's own, and the first one otherwise.
//!
//! Whitespace is never exchanged, so that trimming works, nor are `"` and `\`, so that JSON does.
//! Object keys, roles, types and what tool definitions say are left alone if they are plain names, because
//! templates look them up; a name cannot open or close a marker.

use std::collections::{BTreeSet, HashMap, HashSet};

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value as Json;

use super::error::TemplateError;

/// What a text is to a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Something that is printed.
    Text,
    /// Something that may be looked up.
    Name,
}

/// What to exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hide {
    /// Every character that control tokens consist of.
    All,
    /// Those inside whole control texts.
    Markers,
}

/// The control tokens of a vocabulary.
pub(super) struct Taint {
    markers: AhoCorasick,
    letters: BTreeSet<char>,
}

/// Aliases for one conversation.
pub(super) struct Aliases<'a> {
    taint: &'a Taint,
    alias: HashMap<char, char>,
    letter: HashMap<char, char>,
}

impl Taint {
    pub(super) fn new(control: &[String]) -> Result<Taint, TemplateError> {
        let control = || control.iter().filter(|text| !text.is_empty());
        let markers = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(control())
            .map_err(|_| TemplateError::PrivateUse)?;
        let exchanged = |c: &char| !c.is_whitespace() && !c.is_control() && !matches!(c, '"' | '\\');
        Ok(Taint { markers, letters: control().flat_map(|text| text.chars()).filter(exchanged).collect() })
    }

    /// Finds an unused private-use character for each letter.
    pub(super) fn aliases<'a>(&'a self, values: [&Json; 3], source: &str) -> Result<Aliases<'a>, TemplateError> {
        let mut used: HashSet<char> = source.chars().filter(is_private).collect();
        values.into_iter().for_each(|value| collect_private(value, &mut used));
        let mut free = ('\u{f0000}'..='\u{10fffd}').filter(|c| is_private(c) && !used.contains(c));
        let mut aliases = Aliases { taint: self, alias: HashMap::new(), letter: HashMap::new() };
        for &letter in &self.letters {
            let alias = free.next().ok_or(TemplateError::PrivateUse)?;
            aliases.alias.insert(letter, alias);
            aliases.letter.insert(alias, letter);
        }
        Ok(aliases)
    }

    /// Whether two renderings have the same control tokens in the same order.
    pub(super) fn same_markers(&self, a: &str, b: &str) -> bool {
        let markers = |text| self.markers.find_iter(text).map(|found| found.pattern());
        markers(a).eq(markers(b))
    }
}

impl Aliases<'_> {
    /// The text with its characters exchanged.
    pub(super) fn hide(&self, text: &str, kind: Kind, hide: Hide) -> String {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        if kind == Kind::Name && text.chars().all(is_name) {
            return text.to_owned();
        }
        match hide {
            Hide::All => self.exchange(text),
            Hide::Markers => {
                let mut hidden = String::with_capacity(text.len());
                self.taint.markers.replace_all_with(text, &mut hidden, |_, marker, out| {
                    out.push_str(&self.exchange(marker));
                    true
                });
                hidden
            }
        }
    }

    fn exchange(&self, text: &str) -> String {
        text.chars().map(|c| *self.alias.get(&c).unwrap_or(&c)).collect()
    }

    /// The rendered text with its characters turned back, in pieces: template text (`true`), and what
    /// has no part in control tokens.
    pub(super) fn reveal(&self, text: &str) -> Vec<(String, bool)> {
        let mut pieces: Vec<(String, bool)> = Vec::new();
        for c in text.chars() {
            let letter = self.letter.get(&c);
            let (c, trusted) = (*letter.unwrap_or(&c), letter.is_none());
            match pieces.last_mut() {
                Some((piece, before)) if *before == trusted => piece.push(c),
                _ => pieces.push((c.to_string(), trusted)),
            }
        }
        pieces
    }
}

fn is_private(c: &char) -> bool {
    matches!(c, '\u{f0000}'..='\u{ffffd}' | '\u{100000}'..='\u{10fffd}')
}

fn collect_private(value: &Json, used: &mut HashSet<char>) {
    match value {
        Json::String(text) => used.extend(text.chars().filter(is_private)),
        Json::Array(items) => items.iter().for_each(|item| collect_private(item, used)),
        Json::Object(fields) => {
            for (key, value) in fields {
                used.extend(key.chars().filter(is_private));
                collect_private(value, used);
            }
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => {}
    }
}
