//! `<think>…</think>` at the beginning of a reply, `<tool_call>…</tool_call>` at its end.
//!
//! Marks may be spread over pieces of text; what could be the beginning of one is held back. Space around the marks is
//! layout and belongs to neither side.

use std::sync::Arc;

use super::json_call::JsonCall;
use super::tag_call::TagCall;
use super::{CallForm, Said, certain};
use crate::server::tools::Tool;

const OPEN_THOUGHT: &str = "<think>";
pub(super) const CLOSE_THOUGHT: &str = "</think>";
pub(super) const OPEN_CALL: &str = "<tool_call>";
pub(super) const CLOSE_CALL: &str = "</tool_call>";
/// All of them, thoughts first.
pub(super) const MARKS: [&str; 4] = [OPEN_THOUGHT, CLOSE_THOUGHT, OPEN_CALL, CLOSE_CALL];

/// Where in a reply the text stands.
enum State {
    /// At the beginning: a thought may come.
    Start,
    /// At the beginning of a thought, or of the answer after one: space is dropped.
    Gap {
        thought: bool,
    },
    Thought,
    Answer,
    Call(Call),
    /// After a call: another one, or the end.
    BetweenCalls,
}

enum Call {
    Json(JsonCall),
    Tags(TagCall),
}

/// Reads one reply.
pub(in crate::server) struct Reader {
    state: State,
    held: String,
    calls: Option<CallForm>,
    tools: Arc<[Tool]>,
    n_calls: usize,
}

impl Reader {
    pub(super) fn new(thinks: bool, opened: bool, calls: Option<CallForm>, tools: Arc<[Tool]>) -> Self {
        let state = match (thinks, opened) {
            (true, true) => State::Gap { thought: true },
            (true, false) => State::Start,
            (false, _) => State::Answer,
        };
        Self { state, held: String::new(), calls, tools, n_calls: 0 }
    }

    pub(super) fn push(&mut self, text: &str) -> Said {
        self.held.push_str(text);
        let mut said = Said::default();
        while self.advance(&mut said) {}
        said
    }

    pub(super) fn finish(&mut self) -> Said {
        let mut said = Said::default();
        let rest = std::mem::take(&mut self.held);
        match &self.state {
            State::Start | State::Answer => said.content = rest,
            State::Thought => said.reasoning = rest.trim_end().to_owned(),
            // Cut off before it said what it calls.
            State::Call(call) if !call.is_named() => said.content = format!("{OPEN_CALL}{rest}"),
            State::Gap { .. } | State::Call(_) | State::BetweenCalls => {}
        }
        said
    }

    pub(super) fn called(&self) -> bool {
        matches!(self.state, State::BetweenCalls)
    }

    /// Takes one step; `false` when more text is needed.
    fn advance(&mut self, said: &mut Said) -> bool {
        match &mut self.state {
            State::Start => {
                let trimmed = self.held.trim_start();
                if let Some(rest) = trimmed.strip_prefix(OPEN_THOUGHT) {
                    self.held = rest.to_owned();
                    self.state = State::Gap { thought: true };
                } else if OPEN_THOUGHT.starts_with(trimmed) {
                    return false;
                } else {
                    self.state = State::Answer;
                }
                true
            }
            State::Gap { thought } => {
                self.held.drain(..self.held.len() - self.held.trim_start().len());
                if self.held.is_empty() {
                    return false;
                }
                self.state = if *thought { State::Thought } else { State::Answer };
                true
            }
            State::Thought => {
                let thought = self.take_until(CLOSE_THOUGHT);
                said.reasoning.push_str(&thought);
                let closed = self.strip(CLOSE_THOUGHT);
                if closed {
                    self.state = State::Gap { thought: false };
                }
                closed
            }
            State::Answer => self.answer(said),
            State::Call(call) => {
                let done = call.push(&mut self.held, self.n_calls, &self.tools, said);
                if done {
                    self.n_calls += 1;
                    self.state = State::BetweenCalls;
                }
                done
            }
            State::BetweenCalls => {
                self.held.drain(..self.held.len() - self.held.trim_start().len());
                self.open_call()
            }
        }
    }

    fn answer(&mut self, said: &mut Said) -> bool {
        if self.calls.is_none() {
            said.content.push_str(&self.held);
            self.held.clear();
            return false;
        }
        let text = self.take_until(OPEN_CALL);
        said.content.push_str(&text);
        self.open_call()
    }

    fn open_call(&mut self) -> bool {
        let Some(form) = self.calls else { return false };
        let opened = self.strip(OPEN_CALL);
        if opened {
            self.state = State::Call(match form {
                CallForm::Json => Call::Json(JsonCall::default()),
                CallForm::Tags => Call::Tags(TagCall::default()),
            });
        }
        opened
    }

    /// Takes the text that is certain to stand before `mark`, without the space before it.
    fn take_until(&mut self, mark: &str) -> String {
        let n = self.held[..certain(&self.held, &[mark])].trim_end().len();
        self.held.drain(..n).collect()
    }

    /// Takes `mark`, and space before it, if it comes next and is whole.
    fn strip(&mut self, mark: &str) -> bool {
        let Some(rest) = self.held.trim_start().strip_prefix(mark) else { return false };
        self.held = rest.to_owned();
        true
    }
}

impl Call {
    fn is_named(&self) -> bool {
        match self {
            Call::Json(call) => call.is_named(),
            Call::Tags(call) => call.is_named(),
        }
    }

    /// Takes what it can of `held`; `true` after the mark that ends the call.
    fn push(&mut self, held: &mut String, index: usize, tools: &[Tool], said: &mut Said) -> bool {
        match self {
            Call::Json(call) => call.push(held, index, said),
            Call::Tags(call) => call.push(held, index, tools, said),
        }
    }
}
