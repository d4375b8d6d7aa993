//! Jinja as Hugging Face transformers sets it up for chat templates.
//!
//! Source: `_compile_jinja_template` in transformers' `chat_template_utils.py`.

use std::sync::LazyLock;

use jiff::ZonedDateTime;
use jiff::fmt::strtime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::{Captures, Regex};
use serde_json::Value as Json;

use super::error::Raised;
use super::json;
use super::taint::Kind;

/// Steps that a rendering may take; one is about an instruction, or 64 bytes of text made. A
/// conversation of a thousand messages takes under a million.
pub(super) const FUEL: u64 = 5_000_000;
const MAX_REPR_DEPTH: usize = 200;

/// An environment without templates and without access to files.
pub(super) fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.expect("the default delimiters are valid"));
    env.set_auto_escape_callback(|_| AutoEscape::None);
    // Off in debug builds too: it copies the template and the conversation into every error.
    env.set_debug(false);
    env.set_fuel(Some(FUEL));
    env.set_unknown_method_callback(method);
    env.set_formatter(|out, _, value| out.write_str(&display(value)).map_err(Error::from));
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| display(value));
    env.add_test("iterable", is_iterable);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env
}

/// Hugging Face's `{% generation %}` marks what to train on; it does nothing here. A condition that
/// is always true trims whitespace as the tag would.
pub(super) fn adapt(source: &str) -> String {
    static TAG: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a valid pattern"));
    let replace = |tag: &Captures<'_>| {
        let group = |i| tag.get(i).map_or("", |group| group.as_str());
        let keyword = if group(2).is_empty() { "if true" } else { "endif" };
        format!("{{%{} {keyword} {}%}}", group(1), group(3))
    };
    TAG.replace_all(source, replace).into_owned()
}

/// JSON as a template's value. `map` is applied to every string.
pub(super) fn value(json: &Json, kind: Kind, map: &impl Fn(&str, Kind) -> String) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Value::from(value),
            (None, Some(value)) => Value::from(value),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(map(text, kind)),
        Json::Array(items) => items.iter().map(|item| value(item, kind, map)).collect(),
        Json::Object(fields) => Value::from_pairs(fields.iter().map(|(key, item)| {
            let kind = if matches!(key.as_str(), "role" | "type") { Kind::Name } else { kind };
            (map(key, Kind::Name), value(item, kind, map))
        })),
    }
}

/// What Python prints: `str(value)`.
fn display(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut out = String::new();
            repr(value, &mut out, 0);
            out
        }
    }
}

/// What Python prints inside of lists: `repr(value)`. Nesting beyond `MAX_REPR_DEPTH` is left out.
fn repr(value: &Value, out: &mut String, depth: usize) {
    let items = || value.try_iter().into_iter().flatten().filter(|_| depth < MAX_REPR_DEPTH).enumerate();
    let separate = |out: &mut String, i: usize| out.push_str(if i > 0 { ", " } else { "" });
    match value.kind() {
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::None => out.push_str("None"),
        ValueKind::Number => out.push_str(&json::number(value)),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in items() {
                separate(out, i);
                repr(&item, out, depth + 1);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in items() {
                separate(out, i);
                repr(&key, out, depth + 1);
                out.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), out, depth + 1);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn repr_str(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote || c == '\\' => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Python's methods: those of `pycompat`, and those that it lacks.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let text = value.as_str().zip(args.first().and_then(|arg| arg.as_str()));
    match (name, text) {
        ("removeprefix", Some((text, prefix))) => Ok(text.strip_prefix(prefix).unwrap_or(text).into()),
        ("removesuffix", Some((text, suffix))) => Ok(text.strip_suffix(suffix).unwrap_or(text).into()),
        _ => unknown_method_callback(state, value, name, args),
    }
}

/// `None` cannot be iterated in Python, and an undefined variable can.
fn is_iterable(value: &Value) -> bool {
    value.is_undefined() || (!value.is_none() && value.try_iter().is_ok()) || value.as_str().is_some()
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    strtime::format(format, &ZonedDateTime::now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}")))
}

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, which is
/// what transformers' filter is. It escapes nothing for HTML.
fn tojson(state: &State, value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let style = json::Style {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: kwargs.get("indent")?,
        separators: separators.map(|pair| <[String; 2]>::try_from(pair).map_err(|_| wrong_separators())).transpose()?,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let text = json::dumps(value, &style)?;
    state.consume_fuel(text.len() as u64 / 64)?;
    Ok(text)
}

fn wrong_separators() -> Error {
    Error::new(ErrorKind::InvalidOperation, "separators are a pair of strings")
}
