//! How a template wants its messages, found out by trial: templates agree on the variables and not
//! on their types, and do not say which they take.

use serde_json::{Value as Json, json};

use super::message::{self, Message, Role, ToolCall};
use super::{Chat, Template};

/// A text that no template contains by itself.
const NEEDLE: &str = "zincprobe";

/// How a template wants its messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Content as a list of parts, not as a string.
    pub(super) content_parts: bool,
    /// Missing content as null, not as an empty string.
    pub(super) null_content: bool,
    /// Tool calls are shown at all.
    pub(super) tool_calls: bool,
    /// Arguments of tool calls as a string of JSON, not as an object.
    pub(super) string_arguments: bool,
    /// Tool definitions are shown.
    pub(super) tools: bool,
    /// There is a developer role.
    pub(super) developer: bool,
}

pub(super) fn shape(template: &Template) -> Shape {
    let user = [Message::new(Role::User, NEEDLE)];
    let mut shape = Shape { developer: template.source.contains("developer"), ..Shape::default() };
    let parts = Shape { content_parts: true, ..shape.clone() };
    if !shows(template, &user, &[], &shape) && shows(template, &user, &[], &parts) {
        shape = parts;
    }

    let call = tool_call();
    for (null_content, string_arguments) in [(false, false), (true, false), (false, true), (true, true)] {
        let tried = Shape { tool_calls: true, null_content, string_arguments, ..shape.clone() };
        if shows(template, &call, &[], &tried) {
            shape = tried;
            break;
        }
    }

    let tool = json!({
        "type": "function",
        "function": {"name": NEEDLE, "description": "d", "parameters": {"type": "object", "properties": {}}},
    });
    shape.tools = shows(template, &[Message::new(Role::User, "u")], &[tool], &shape);
    shape
}

/// A conversation with a tool call. Some templates ask for ids of nine letters and digits.
fn tool_call() -> [Message; 3] {
    let id = "probe0001".to_owned();
    let call = ToolCall { id: Some(id.clone()), name: NEEDLE.to_owned(), arguments: json!({"a": "b"}) };
    let asked = Message { content: None, tool_calls: vec![call], ..Message::new(Role::Assistant, "") };
    let answer = Message { tool_call_id: Some(id), ..Message::new(Role::Tool, "r") };
    [Message::new(Role::User, "u"), asked, answer]
}

/// Whether the needle comes out.
fn shows(template: &Template, messages: &[Message], tools: &[Json], shape: &Shape) -> bool {
    let messages = Json::Array(message::to_json(messages, shape));
    let json_tools = Json::Array(tools.to_vec());
    let chat = Chat { tools, add_generation_prompt: true, ..Chat::default() };
    let context = template.context(&chat, [&messages, &json_tools, &Json::Null], |text, _| text.to_owned());
    template.run(context).is_ok_and(|text| text.contains(NEEDLE))
}
