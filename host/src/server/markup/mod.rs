//! How a model marks thoughts and calls of tools in what it writes, told by its chat template.
//!
//! | form | thought | call |
//! |---|---|---|
//! | JSON (Hermes, Qwen 2.5 and 3) | `<think>…</think>` | `<tool_call>` `{"name": "f", "arguments": {"x": 1}}` `</tool_call>` |
//! | tags (Qwen 3 Coder, Qwen 3.5) | `<think>…</think>` | `<tool_call>` `<function=f>` `<parameter=x>` `1` … |
//! | channels (gpt-oss) | `<\|channel\|>analysis<\|message\|>…` | `<\|channel\|>commentary to=functions.f <\|constrain\|>json<\|message\|>{"x": 1}` |
//!
//! Both directions are here: [`grammar`] writes down what a reply may be where a request restricts it, and a [`Reader`]
//! takes a reply apart, however its text is cut. Wherever calls may come there is a grammar, so a reader meets no
//! malformed ones, only ones that were cut off.

mod channels;
pub(super) mod grammar;
mod json_call;
mod tag_call;
mod tags;

use std::sync::Arc;

use super::tools::Tool;
use crate::chat::Template;
use crate::tokenizer::Tokenizer;

/// How a model writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Markup {
    /// Text with tags.
    Tags {
        /// Whether a thought may come first.
        thinks: bool,
        /// How calls look, where the template can offer tools.
        calls: Option<CallForm>,
    },
    /// Messages in channels.
    Channels {
        /// Whether the template can offer tools.
        calls: bool,
    },
}

/// How a call between `<tool_call>` and `</tool_call>` looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallForm {
    Json,
    Tags,
}

/// Parts of a reply, each possibly empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) reasoning: String,
    pub(super) content: String,
    pub(super) calls: Vec<CallPiece>,
}

/// A call, or more of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallPiece {
    /// Which of the reply's calls.
    pub(super) index: usize,
    /// The tool, in the call's first piece.
    pub(super) name: Option<String>,
    /// More of the arguments' JSON.
    pub(super) arguments: String,
}

impl Markup {
    /// Text without marks.
    pub(super) const PLAIN: Markup = Markup::Tags { thinks: false, calls: None };

    /// What a template's marks say.
    pub(super) fn of(template: &Template) -> Markup {
        let has = |mark| template.source().contains(mark);
        if has("<|channel|>") && has("<|message|>") {
            return Markup::Channels { calls: template.supports_tools() };
        }
        let calls = if !template.supports_tools() || !has(tags::OPEN_CALL) {
            None
        } else if has("<function=") {
            Some(CallForm::Tags)
        } else {
            Some(CallForm::Json)
        };
        Markup::Tags { thinks: has(tags::CLOSE_THOUGHT), calls }
    }

    /// Whether calls can be offered.
    pub(super) fn calls_tools(self) -> bool {
        matches!(self, Markup::Tags { calls: Some(_), .. } | Markup::Channels { calls: true })
    }

    /// Whether marks are control tokens, whose text has to be asked for.
    pub(super) fn is_hidden(self, tokenizer: &Tokenizer) -> bool {
        let marks: &[&str] = match self {
            Markup::Tags { thinks, calls } => match (thinks, calls.is_some()) {
                (false, false) => &[],
                (true, false) => &tags::MARKS[..2],
                (false, true) => &tags::MARKS[2..],
                (true, true) => &tags::MARKS,
            },
            Markup::Channels { .. } => &channels::MARKS,
        };
        marks.iter().any(|mark| hidden_id(tokenizer, mark).is_some())
    }

    /// A reader of one reply. `opens_thought`: the prompt has begun a thought; `tools`: what may be called.
    pub(super) fn reader(self, opens_thought: bool, tools: &Arc<[Tool]>) -> Reader {
        match self {
            Markup::Tags { thinks, calls } => {
                let calls = calls.filter(|_| !tools.is_empty());
                Reader::Tags(tags::Reader::new(thinks, opens_thought, calls, tools.clone()))
            }
            Markup::Channels { .. } => Reader::Channels(channels::Reader::default()),
        }
    }
}

/// The id of a control token by its text; `None` if the text is written with visible tokens.
fn hidden_id(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    tokenizer.special_id(text).filter(|id| tokenizer.token_bytes(*id).is_empty())
}

/// Takes one reply apart. The parts do not depend on how the text is cut.
pub(super) enum Reader {
    Tags(tags::Reader),
    Channels(channels::Reader),
}

impl Reader {
    /// Takes more of the reply; gives what is certain.
    pub(super) fn push(&mut self, text: &str) -> Said {
        match self {
            Reader::Tags(reader) => reader.push(text),
            Reader::Channels(reader) => reader.push(text),
        }
    }

    /// The reply is over: what is held back is what it looks like.
    pub(super) fn finish(&mut self) -> Said {
        match self {
            Reader::Tags(reader) => reader.finish(),
            Reader::Channels(reader) => reader.finish(),
        }
    }

    /// Whether the reply consists of calls, the last of them whole.
    pub(super) fn called(&self) -> bool {
        match self {
            Reader::Tags(reader) => reader.called(),
            Reader::Channels(reader) => reader.called(),
        }
    }
}

impl Said {
    pub(super) fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty() && self.calls.is_empty()
    }

    /// Adds to call `index`, together with what this holds of it already.
    fn call(&mut self, index: usize, name: Option<String>, arguments: &str) {
        match self.calls.last_mut() {
            Some(piece) if piece.index == index => piece.arguments.push_str(arguments),
            _ => self.calls.push(CallPiece { index, name, arguments: arguments.to_owned() }),
        }
    }

    /// Appends what came later.
    pub(super) fn extend(&mut self, later: Said) {
        self.reasoning.push_str(&later.reasoning);
        self.content.push_str(&later.content);
        for piece in later.calls {
            self.call(piece.index, piece.name, &piece.arguments);
        }
    }
}

/// Bytes at the beginning of `text` that are certain not to begin with any of `marks`, whole or cut off at the end.
fn certain(text: &str, marks: &[&str]) -> usize {
    let may_begin = |i: usize| marks.iter().any(|mark| text[i..].starts_with(mark) || mark.starts_with(&text[i..]));
    text.char_indices().map(|(i, _)| i).find(|&i| may_begin(i)).unwrap_or(text.len())
}

/// Finds JSON's end as it comes.
#[derive(Clone, Copy, Debug, Default)]
struct JsonScan {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl JsonScan {
    /// Bytes of `text` up to the end of the object or list that began before or begins here; `None` if it goes on.
    fn end(&mut self, text: &str) -> Option<usize> {
        for (i, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(i + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
