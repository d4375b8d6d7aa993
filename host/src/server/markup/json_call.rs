//! `{"name": "f", "arguments": {"x": 1}}`, as it comes: the arguments go on to the client as they are.

use super::tags::CLOSE_CALL;
use super::{JsonScan, Said};

const NAME: &str = "{\"name\": \"";
const ARGUMENTS: &str = "\", \"arguments\": ";

/// A call's text, but for the name and the arguments: what stands before, between and after them.
pub(super) fn layout(name: &str) -> (String, &'static str) {
    (format!("\n{NAME}{name}{ARGUMENTS}"), "}\n")
}

#[derive(Default)]
pub(super) struct JsonCall {
    state: State,
}

#[derive(Default)]
enum State {
    #[default]
    Head,
    Arguments(JsonScan),
    Tail,
}

impl JsonCall {
    pub(super) fn is_named(&self) -> bool {
        !matches!(self.state, State::Head)
    }

    /// Takes what it can of `held`; `true` after the mark that ends the call.
    pub(super) fn push(&mut self, held: &mut String, index: usize, said: &mut Said) -> bool {
        if matches!(self.state, State::Head) {
            let Some((head, rest)) = held.split_once(ARGUMENTS) else { return false };
            let name = head.trim_start().strip_prefix(NAME).unwrap_or_default().to_owned();
            said.call(index, Some(name), "");
            *held = rest.to_owned();
            self.state = State::Arguments(JsonScan::default());
        }
        if let State::Arguments(scan) = &mut self.state {
            let end = scan.end(held);
            let taken: String = held.drain(..end.unwrap_or(held.len())).collect();
            if !taken.is_empty() {
                said.call(index, None, &taken);
            }
            if end.is_none() {
                return false;
            }
            self.state = State::Tail;
        }
        let Some((_, rest)) = held.split_once(CLOSE_CALL) else { return false };
        *held = rest.to_owned();
        true
    }
}
