//! `<function=f>` with a `<parameter=x>` for each argument, as it comes: a value that is text becomes a JSON string
//! piece by piece, any other is JSON already.

use serde::de::IgnoredAny;
use serde_json::Value;

use super::tags::CLOSE_CALL;
use super::{Said, certain};
use crate::server::tools::{Argument, ArgumentValue, Tool};

pub(super) const FUNCTION: &str = "<function=";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const END_HEAD: &str = ">\n";
pub(super) const END_VALUE: &str = "\n</parameter>\n";
pub(super) const END_FUNCTION: &str = "</function>\n";

#[derive(Default)]
pub(super) struct TagCall {
    state: State,
    name: String,
    n_arguments: usize,
}

#[derive(Default)]
enum State {
    #[default]
    Head,
    /// Before a parameter or the end.
    Between,
    Value(Kind),
    Tail,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Json,
    /// JSON if it is valid JSON, else text: known at its end.
    Either,
}

impl TagCall {
    pub(super) fn is_named(&self) -> bool {
        !matches!(self.state, State::Head)
    }

    /// Takes what it can of `held`; `true` after the mark that ends the call.
    pub(super) fn push(&mut self, held: &mut String, index: usize, tools: &[Tool], said: &mut Said) -> bool {
        loop {
            match &self.state {
                State::Head => {
                    let Some((head, rest)) = held.split_once(END_HEAD) else { return false };
                    self.name = head.trim_start().strip_prefix(FUNCTION).unwrap_or_default().to_owned();
                    said.call(index, Some(self.name.clone()), "{");
                    *held = rest.to_owned();
                    self.state = State::Between;
                }
                State::Between => {
                    if let Some(rest) = held.strip_prefix(END_FUNCTION) {
                        said.call(index, None, "}");
                        *held = rest.to_owned();
                        self.state = State::Tail;
                        continue;
                    }
                    let Some((key, rest)) = held.strip_prefix(PARAMETER).and_then(|rest| rest.split_once(END_HEAD))
                    else {
                        return false;
                    };
                    let kind = kind(tools, &self.name, key);
                    let comma = if self.n_arguments > 0 { ", " } else { "" };
                    let quote = if kind == Kind::Text { "\"" } else { "" };
                    said.call(index, None, &format!("{comma}{}: {quote}", Value::from(key)));
                    *held = rest.to_owned();
                    self.n_arguments += 1;
                    self.state = State::Value(kind);
                }
                State::Value(kind) => {
                    let kind = *kind;
                    let end = held.find(END_VALUE);
                    let n = match (end, kind) {
                        (Some(end), _) => end,
                        (None, Kind::Either) => 0,
                        (None, _) => certain(held, &[END_VALUE]),
                    };
                    let value: String = held.drain(..n).collect();
                    let value = match kind {
                        Kind::Text => escaped(&value),
                        Kind::Json => value,
                        Kind::Either if end.is_none() => return false,
                        Kind::Either => match serde_json::from_str::<IgnoredAny>(&value) {
                            Ok(_) => value,
                            Err(_) => Value::from(value).to_string(),
                        },
                    };
                    if !value.is_empty() {
                        said.call(index, None, &value);
                    }
                    if end.is_none() {
                        return false;
                    }
                    held.drain(..END_VALUE.len());
                    if kind == Kind::Text {
                        said.call(index, None, "\"");
                    }
                    self.state = State::Between;
                }
                State::Tail => {
                    let Some((_, rest)) = held.split_once(CLOSE_CALL) else { return false };
                    *held = rest.to_owned();
                    return true;
                }
            }
        }
    }
}

fn kind(tools: &[Tool], name: &str, key: &str) -> Kind {
    let tool = tools.iter().find(|tool| tool.name == name);
    match tool.and_then(|tool| tool.arguments.iter().find(|argument| argument.name == key)) {
        Some(Argument { value: ArgumentValue::Text | ArgumentValue::OneOf(_), .. }) => Kind::Text,
        Some(Argument { value: ArgumentValue::Json(_), .. }) => Kind::Json,
        Some(Argument { value: ArgumentValue::Any, .. }) | None => Kind::Either,
    }
}

/// `text` inside a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
