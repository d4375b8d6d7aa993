//! Messages of the OpenAI chat API, checked, and in the form that templates expect.

use serde_json::{Map, Value as Json, json};

use super::error::TemplateError;
use super::probe::Shape;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions, by OpenAI's newer name.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    const ALL: [Role; 5] = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool];

    /// The role's name in requests and templates.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// A call that the assistant made.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The call's id, which the tool's message repeats.
    pub id: Option<String>,
    /// The function's name.
    pub name: String,
    /// Its arguments: an object, or a string where the client sent one that is not a JSON object.
    pub arguments: Json,
}

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What they say; `None` where an assistant only called tools.
    pub content: Option<String>,
    /// What the assistant thought before.
    pub reasoning: Option<String>,
    /// Calls that the assistant made.
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool's message answers.
    pub tool_call_id: Option<String>,
    /// The speaker's or tool's name.
    pub name: Option<String>,
}

impl Message {
    /// A message of text alone.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: Some(content.into()),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Reads the `messages` of a request.
    ///
    /// # Errors
    /// [`TemplateError::Message`] names the part that is wrong.
    pub fn parse_all(messages: &Json) -> Result<Vec<Message>, TemplateError> {
        match messages.as_array() {
            Some(list) if !list.is_empty() => {
                list.iter().enumerate().map(|(i, message)| parse(&format!("messages[{i}]"), message)).collect()
            }
            _ => Err(wrong("messages", "expected a list of at least one message")),
        }
    }
}

fn wrong(place: &str, problem: impl Into<String>) -> TemplateError {
    TemplateError::Message { place: place.to_owned(), problem: problem.into() }
}

fn parse(place: &str, message: &Json) -> Result<Message, TemplateError> {
    let fields = message.as_object().ok_or_else(|| wrong(place, "expected an object"))?;
    let role = parse_role(&format!("{place}.role"), fields.get("role"))?;
    let tool_calls = match fields.get("tool_calls") {
        None | Some(Json::Null) => Vec::new(),
        Some(calls) => parse_calls(&format!("{place}.tool_calls"), calls)?,
    };
    let content = parse_content(&format!("{place}.content"), fields.get("content"))?;
    if content.is_none() && !matches!(role, Role::Assistant | Role::Tool) {
        return Err(wrong(&format!("{place}.content"), "expected a string or a list of parts"));
    }
    let text = |key: &str| match fields.get(key) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(wrong(&format!("{place}.{key}"), "expected a string")),
    };
    Ok(Message {
        role,
        content,
        reasoning: text("reasoning_content")?.or(text("reasoning")?),
        tool_calls,
        tool_call_id: text("tool_call_id")?,
        name: text("name")?,
    })
}

/// Roles are a closed set: a template prints them between its own markers.
fn parse_role(place: &str, role: Option<&Json>) -> Result<Role, TemplateError> {
    let name = role.and_then(Json::as_str).ok_or_else(|| wrong(place, "expected a string"))?;
    // The name of tools before they were called tools.
    let name = if name == "function" { "tool" } else { name };
    Role::ALL.into_iter().find(|role| role.name() == name).ok_or_else(|| {
        let names = Role::ALL.map(Role::name).join(", ");
        wrong(place, format!("{name:?} is not one of {names}"))
    })
}

fn parse_content(place: &str, content: Option<&Json>) -> Result<Option<String>, TemplateError> {
    match content {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.clone())),
        Some(Json::Array(parts)) => {
            let parts = parts.iter().enumerate().map(|(i, part)| parse_part(&format!("{place}[{i}]"), part));
            Ok(Some(parts.collect::<Result<Vec<_>, _>>()?.join("\n")))
        }
        Some(_) => Err(wrong(place, "expected a string or a list of parts")),
    }
}

fn parse_part<'a>(place: &str, part: &'a Json) -> Result<&'a str, TemplateError> {
    match part.get("type").and_then(Json::as_str) {
        Some("text" | "input_text" | "output_text") => {
            part.get("text").and_then(Json::as_str).ok_or_else(|| wrong(&format!("{place}.text"), "expected a string"))
        }
        Some(kind) => Err(wrong(place, format!("this model takes text only, not {kind:?}"))),
        None => Err(wrong(&format!("{place}.type"), "expected a string")),
    }
}

fn parse_calls(place: &str, calls: &Json) -> Result<Vec<ToolCall>, TemplateError> {
    let calls = calls.as_array().ok_or_else(|| wrong(place, "expected a list"))?;
    calls.iter().enumerate().map(|(i, call)| parse_call(&format!("{place}[{i}]"), call)).collect()
}

fn parse_call(place: &str, call: &Json) -> Result<ToolCall, TemplateError> {
    let function = call.get("function").ok_or_else(|| wrong(place, "expected a \"function\""))?;
    let name = function.get("name").and_then(Json::as_str);
    let name = name.ok_or_else(|| wrong(&format!("{place}.function.name"), "expected a string"))?;
    let arguments = match function.get("arguments") {
        None | Some(Json::Null) => Json::Object(Map::new()),
        // The API sends arguments as a string of JSON; templates expect what it says.
        Some(Json::String(text)) => match serde_json::from_str(text) {
            Ok(Json::Object(object)) => Json::Object(object),
            _ => Json::String(text.clone()),
        },
        Some(Json::Object(object)) => Json::Object(object.clone()),
        Some(_) => return Err(wrong(&format!("{place}.function.arguments"), "expected a string or an object")),
    };
    let id = call.get("id").and_then(Json::as_str).map(str::to_owned);
    Ok(ToolCall { id, name: name.to_owned(), arguments })
}

/// The `messages` of a template's context.
pub(super) fn to_json(messages: &[Message], shape: &Shape) -> Vec<Json> {
    messages.iter().map(|message| message_to_json(message, shape)).collect()
}

fn message_to_json(message: &Message, shape: &Shape) -> Json {
    let role = match message.role {
        Role::Developer if !shape.developer => Role::System,
        role => role,
    };
    let mut fields = Map::new();
    fields.insert("role".into(), role.name().into());
    let mut content = message.content.clone();
    if !message.tool_calls.is_empty() {
        if shape.tool_calls {
            fields
                .insert("tool_calls".into(), message.tool_calls.iter().map(|call| call_to_json(call, shape)).collect());
        } else {
            // The template drops calls, and then the tool's answer would come out of nowhere.
            let calls = message
                .tool_calls
                .iter()
                .map(|call| json!({"name": call.name, "arguments": call.arguments}).to_string());
            content =
                Some(content.into_iter().filter(|text| !text.is_empty()).chain(calls).collect::<Vec<_>>().join("\n"));
        }
    }
    let text = match content {
        None if shape.null_content => Json::Null,
        None => "".into(),
        Some(text) if shape.content_parts => json!([{"type": "text", "text": text}]),
        Some(text) => text.into(),
    };
    fields.insert("content".into(), text);
    let optional = [
        ("reasoning_content", &message.reasoning),
        ("thinking", &message.reasoning),
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ];
    for (key, text) in optional {
        if let Some(text) = text {
            fields.insert(key.into(), text.as_str().into());
        }
    }
    Json::Object(fields)
}

fn call_to_json(call: &ToolCall, shape: &Shape) -> Json {
    let arguments = match &call.arguments {
        Json::Object(object) if shape.string_arguments => Json::String(Json::Object(object.clone()).to_string()),
        arguments => arguments.clone(),
    };
    let mut fields = Map::new();
    if let Some(id) = &call.id {
        fields.insert("id".into(), id.as_str().into());
    }
    fields.insert("type".into(), "function".into());
    fields.insert("function".into(), json!({"name": call.name, "arguments": arguments}));
    Json::Object(fields)
}
