//! Tools: what a client offers, and whether one has to be called.

use serde_json::{Map, Value, json};

use super::app::Model;
use super::error::ApiError;
use super::fields::Fields;

/// OpenAI's limits.
const MAX_NAME: usize = 64;
const MAX_TOOLS: usize = 128;
/// References in a row from one definition to another.
const MAX_REFERENCES: usize = 16;

/// The tools of a request.
#[derive(Default)]
pub(super) struct Tools<'a> {
    /// As the client sent them, for the chat template.
    pub(super) offered: &'a [Value],
    /// Those that the reply may call.
    pub(super) callable: Vec<Tool>,
    /// Whether the reply has to be a call.
    pub(super) required: bool,
    /// Whether it may be several.
    pub(super) parallel: bool,
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tool {
    pub(super) name: String,
    /// The schema of its arguments: an object.
    pub(super) parameters: Value,
    /// The properties of that.
    pub(super) arguments: Vec<Argument>,
}

/// An argument, for forms that write each by itself.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Argument {
    pub(super) name: String,
    pub(super) required: bool,
    pub(super) value: ArgumentValue,
}

/// What an argument is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ArgumentValue {
    /// A text.
    Text,
    /// One of these texts.
    OneOf(Vec<String>),
    /// JSON of this schema, which is no text.
    Json(Value),
    /// JSON or text.
    Any,
}

/// `tools`, `tool_choice` and `parallel_tool_calls`.
pub(super) fn read<'a>(model: &Model, fields: &Fields<'a>) -> Result<Tools<'a>, ApiError> {
    if fields.list("functions")?.is_some_and(|list| !list.is_empty()) {
        return Err(ApiError::unsupported("functions", "the older form of tools"));
    }
    let offered = fields.list("tools")?.unwrap_or_default();
    let parallel = fields.get("parallel_tool_calls").is_none() || fields.bool("parallel_tool_calls")?;
    let choice = Choice::read(fields)?;
    if choice == Choice::None {
        return Ok(Tools::default());
    }
    if offered.is_empty() {
        let demanded = choice != Choice::Auto;
        return if demanded { Err(fields.wrong("tool_choice", "there are no tools")) } else { Ok(Tools::default()) };
    }
    if !model.markup.calls_tools() {
        return Err(ApiError::unsupported("tools", "calling tools with this model's chat template"));
    }
    if offered.len() > MAX_TOOLS {
        return Err(fields.wrong("tools", format!("{} tools; at most {MAX_TOOLS} are allowed", offered.len())));
    }
    let mut callable: Vec<Tool> = Vec::with_capacity(offered.len());
    for (i, tool) in offered.iter().enumerate() {
        let tool = Tool::parse(&format!("tools[{i}]"), tool)?;
        if callable.iter().any(|other| other.name == tool.name) {
            return Err(ApiError::field(format!("tools[{i}]"), format!("there are two tools named {:?}", tool.name)));
        }
        callable.push(tool);
    }
    if let Choice::Named(name) = choice {
        callable.retain(|tool| tool.name == name);
        if callable.is_empty() {
            return Err(fields.wrong("tool_choice", format!("there is no tool named {name:?}")));
        }
    }
    Ok(Tools { offered, callable, required: choice != Choice::Auto, parallel })
}

#[derive(Clone, Copy, PartialEq)]
enum Choice<'a> {
    None,
    Auto,
    Required,
    Named(&'a str),
}

impl<'a> Choice<'a> {
    fn read(fields: &Fields<'a>) -> Result<Choice<'a>, ApiError> {
        let expected =
            "expected \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\"}}";
        match fields.get("tool_choice") {
            None => Ok(Choice::Auto),
            Some(Value::String(choice)) => match choice.as_str() {
                "none" => Ok(Choice::None),
                "auto" => Ok(Choice::Auto),
                "required" => Ok(Choice::Required),
                _ => Err(fields.wrong("tool_choice", expected)),
            },
            Some(choice) if choice["type"] == "allowed_tools" => {
                Err(ApiError::unsupported("tool_choice", "allowing some of the tools"))
            }
            Some(choice) if choice["type"] == "function" => match choice["function"]["name"].as_str() {
                Some(name) => Ok(Choice::Named(name)),
                None => Err(fields.wrong("tool_choice", expected)),
            },
            Some(_) => Err(fields.wrong("tool_choice", expected)),
        }
    }
}

impl Tool {
    /// Reads one of the `tools`, at `place`.
    pub(super) fn parse(place: &str, tool: &Value) -> Result<Tool, ApiError> {
        let is_name = |name: &&str| {
            let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
            (1..=MAX_NAME).contains(&name.len()) && name.chars().all(ok)
        };
        let name = tool["function"]["name"].as_str().filter(is_name).filter(|_| tool["type"] == "function");
        let name =
            name.ok_or_else(|| ApiError::field(place, "expected a function with a name of letters, digits, _ and -"))?;
        let parameters = match &tool["function"]["parameters"] {
            Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
            Value::Object(schema) => {
                let mut schema = schema.clone();
                if schema.get("type").is_none_or(Value::is_null) {
                    schema.insert("type".to_owned(), "object".into());
                }
                Value::Object(schema)
            }
            _ => Value::Null,
        };
        if parameters["type"] != "object" {
            let place = format!("{place}.function.parameters");
            return Err(ApiError::field(place, "expected a schema of type \"object\""));
        }
        Ok(Tool { name: name.to_owned(), arguments: arguments(&parameters), parameters })
    }
}

fn arguments(parameters: &Value) -> Vec<Argument> {
    let required = parameters["required"].as_array();
    let is_required = |name: &str| required.is_some_and(|names| names.iter().any(|other| other == name));
    let properties = parameters["properties"].as_object().into_iter().flatten();
    let argument = |(name, schema): (&String, &Value)| Argument {
        required: is_required(name),
        value: argument_value(parameters, schema),
        name: name.clone(),
    };
    properties.map(argument).collect()
}

fn argument_value(parameters: &Value, schema: &Value) -> ArgumentValue {
    let schema = resolve(parameters, schema);
    let one_of = match (&schema["enum"], &schema["const"]) {
        (Value::Array(values), _) => values.iter().map(|value| value.as_str().map(str::to_owned)).collect(),
        (_, Value::String(value)) => Some(vec![value.clone()]),
        _ => None,
    };
    if let Some(values) = one_of.filter(|values: &Vec<String>| !values.is_empty()) {
        return ArgumentValue::OneOf(values);
    }
    match schema["type"].as_str() {
        Some("string") => ArgumentValue::Text,
        Some(_) => ArgumentValue::Json(with_definitions(parameters, schema)),
        None => ArgumentValue::Any,
    }
}

/// Follows references inside the document.
fn resolve<'a>(document: &'a Value, mut schema: &'a Value) -> &'a Value {
    for _ in 0..MAX_REFERENCES {
        let pointer = schema["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
        match pointer.and_then(|pointer| document.pointer(pointer)) {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}

/// A part of a schema as a schema of its own.
fn with_definitions(document: &Value, schema: &Value) -> Value {
    let mut map: Map<String, Value> = schema.as_object().cloned().unwrap_or_default();
    for key in ["$defs", "definitions"] {
        if let Some(definitions) = document.get(key) {
            map.insert(key.to_owned(), definitions.clone());
        }
    }
    Value::Object(map)
}
