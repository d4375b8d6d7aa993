//! Tools: what a client offers, and the calls in what a model writes.
//!
//! The chat template shows the offer to the model. Two ways to write a call are known, told apart by the template:
//! JSON (Hermes, Qwen 2.5 and 3) and tags (Qwen 3 Coder, Qwen 3.5):
//!
//! ```text
//! <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
//! <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
//! ```
//!
//! Nothing forces a model to call, or to call well, so a call can be offered (`auto`) and not demanded. What is no
//! well-formed call stays text.

use serde_json::{Map, Value};

use super::app::Model;
use super::error::ApiError;
use super::fields::Fields;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
/// OpenAI's limit.
const MAX_NAME: usize = 64;

/// The tools of a request, empty where there are none to be called.
pub(super) fn read<'a>(model: &Model, fields: &Fields<'a>) -> Result<&'a [Value], ApiError> {
    if fields.list("functions")?.is_some_and(|list| !list.is_empty()) {
        return Err(ApiError::unsupported("functions", "the older form of tools"));
    }
    let tools = fields.list("tools")?.unwrap_or_default();
    if tools.is_empty() || fields.get("tool_choice").is_some_and(|choice| choice == "none") {
        return Ok(&[]);
    }
    if fields.get("tool_choice").is_some_and(|choice| choice != "auto") {
        return Err(ApiError::unsupported("tool_choice", "demanding a call"));
    }
    if fields.get("parallel_tool_calls").is_some_and(|parallel| parallel == false) {
        return Err(ApiError::unsupported("parallel_tool_calls", "limiting the calls to one"));
    }
    if !model.calls_tools {
        return Err(ApiError::unsupported("tools", "calling tools with this model's chat template"));
    }
    for (i, tool) in tools.iter().enumerate() {
        let name = tool["function"]["name"].as_str();
        let is_name = |name: &str| {
            let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
            (1..=MAX_NAME).contains(&name.len()) && name.chars().all(ok)
        };
        if tool["type"] != "function" || !name.is_some_and(is_name) {
            let expected = "expected a function with a name of letters, digits, _ and -";
            return Err(ApiError::field(format!("tools[{i}]"), expected));
        }
    }
    Ok(tools)
}

/// Whether replies to this template's prompts have calls that [`CallSplitter`] knows.
pub(super) fn knows(template: &crate::chat::Template) -> bool {
    template.supports_tools() && template.source().contains(OPEN)
}

/// A call that the model made.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    pub(super) name: String,
    /// An object as text, as the API has it.
    pub(super) arguments: String,
}

/// Takes the calls out of the text of a reply, however that is cut.
#[derive(Debug, Default)]
pub(super) struct CallSplitter {
    /// What may be the beginning of a call, and the space before it.
    held: String,
}

impl CallSplitter {
    /// Takes more text; gives back what is certain to be no call, and the calls that are complete.
    pub(super) fn push(&mut self, text: &str) -> (String, Vec<Call>) {
        self.held.push_str(text);
        let (mut out, mut calls) = (String::new(), Vec::new());
        while let Some(start) = self.held.find(OPEN) {
            let Some(length) = self.held[start..].find(CLOSE) else { break };
            let end = start + length + CLOSE.len();
            match parse(&self.held[start + OPEN.len()..start + length]) {
                Some(call) => {
                    out.push_str(self.held[..start].trim_end());
                    calls.push(call);
                }
                None => out.push_str(&self.held[..end]),
            }
            self.held.drain(..end);
        }
        // From here on it may be a call: a whole mark, or an ending that begins one; and the space before.
        let is_mark = |i: usize| self.held[i..].starts_with(OPEN) || OPEN.starts_with(&self.held[i..]);
        let mark = self.held.char_indices().map(|(i, _)| i).find(|&i| is_mark(i)).unwrap_or(self.held.len());
        let n_certain = self.held[..mark].trim_end().len();
        out.extend(self.held.drain(..n_certain));
        (out, calls)
    }

    /// The reply is over: what is held is text after all. Space after a call is not.
    pub(super) fn finish(&mut self, called: bool) -> String {
        let rest = std::mem::take(&mut self.held);
        if called && rest.trim().is_empty() { String::new() } else { rest }
    }
}

fn parse(text: &str) -> Option<Call> {
    let text = text.trim();
    if text.starts_with("<function=") { parse_tags(text) } else { parse_json(text) }
}

fn parse_json(text: &str) -> Option<Call> {
    let call: Value = serde_json::from_str(text).ok()?;
    let arguments = match call.get("arguments").or(call.get("parameters")) {
        None | Some(Value::Null) => Map::new(),
        Some(arguments) => arguments.as_object()?.clone(),
    };
    Some(Call { name: call["name"].as_str()?.to_owned(), arguments: Value::Object(arguments).to_string() })
}

/// Values are JSON where they are valid JSON, and texts otherwise.
fn parse_tags(text: &str) -> Option<Call> {
    let (name, mut rest) = text.strip_prefix("<function=")?.split_once('>')?;
    let mut arguments = Map::new();
    loop {
        rest = rest.trim_start();
        if let Some(end) = rest.strip_prefix("</function>") {
            let arguments = Value::Object(arguments).to_string();
            return end.trim().is_empty().then(|| Call { name: name.to_owned(), arguments });
        }
        let (key, after) = rest.strip_prefix("<parameter=")?.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into()));
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, arguments: &str) -> Call {
        Call { name: name.to_owned(), arguments: arguments.to_owned() }
    }

    #[test]
    fn calls_are_found_however_the_text_is_cut() {
        let json = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"é\"}}\n</tool_call>\n\
                    <tool_call>{\"name\":\"g\"}</tool_call>\n";
        let tags = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\na\nb\n</parameter>\n\
                    </function>\n</tool_call>";
        for (text, content, calls) in [
            (json, "Let me see.", vec![call("f", r#"{"x":"é"}"#), call("g", "{}")]),
            (tags, "", vec![call("f", r#"{"x":1,"s":"a\nb"}"#)]),
            ("no <tool call> \n", "no <tool call> \n", vec![]),
            ("<tool_call>no</tool_call> <tool_ca", "<tool_call>no</tool_call> <tool_ca", vec![]),
            ("<tool_call>{\"name\": \"f\"", "<tool_call>{\"name\": \"f\"", vec![]),
            ("<tool_call><function=f><parameter=x>", "<tool_call><function=f><parameter=x>", vec![]),
        ] {
            let chars: Vec<String> = text.chars().map(String::from).collect();
            let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
            for pieces in [&[text][..], &chars] {
                let mut splitter = CallSplitter::default();
                let (mut out, mut found) = (String::new(), Vec::new());
                for piece in pieces {
                    let (text, calls) = splitter.push(piece);
                    out.push_str(&text);
                    found.extend(calls);
                }
                out.push_str(&splitter.finish(!found.is_empty()));
                assert_eq!((out.as_str(), &found), (content, &calls), "{pieces:?}");
            }
        }
    }
}
