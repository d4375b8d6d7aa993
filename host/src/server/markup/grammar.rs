//! What a reply may be, as a grammar.

use std::fmt::Write;

use serde_json::{Value, json};

use super::channels::{CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START};
use super::tags::{CLOSE_CALL, CLOSE_THOUGHT, MARKS, OPEN_CALL};
use super::{CallForm, Markup, hidden_id, json_call, tag_call};
use crate::server::tools::{ArgumentValue, Tool, Tools};
use crate::tokenizer::Tokenizer;

/// Space between the parts of a JSON text: enough for any layout, and an end to a model that would go on for ever.
const JSON_SPACE: &str = r"[ \n\r\t]{1,64}";
/// Space between a thought and what has to follow it.
const GAP: &str = r"/[ \n\r\t]{1,16}/";

/// What restricts a reply.
pub(in crate::server) struct Rules<'a> {
    pub(in crate::server) tools: &'a Tools<'a>,
    /// The schema of the answer, if it has to be JSON.
    pub(in crate::server) schema: Option<&'a Value>,
    /// Whether the prompt ends inside a thought.
    pub(in crate::server) opens_thought: bool,
}

/// The grammar of a reply; `None` if it may be anything.
///
/// # Errors
/// A tool whose arguments the form of calls cannot write.
pub(in crate::server) fn write(
    markup: Markup,
    tokenizer: &Tokenizer,
    rules: &Rules<'_>,
) -> Result<Option<String>, String> {
    if rules.schema.is_none() && rules.tools.callable.is_empty() {
        return Ok(None);
    }
    let mut writer = Writer { tokenizer, rules, out: String::new() };
    match markup {
        Markup::Tags { thinks, calls } => writer.tags(thinks, calls)?,
        Markup::Channels { .. } => writer.channels(),
    }
    if let Some(schema) = rules.schema {
        writer.line(format_args!("answer: {}", json_value(schema)));
    }
    Ok(Some(writer.out))
}

struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    rules: &'a Rules<'a>,
    out: String,
}

impl Writer<'_> {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // A String takes whatever is written to it.
        writeln!(self.out, "{line}").ok();
    }

    /// A mark: a control token, or a text.
    fn mark(&self, mark: &str) -> String {
        hidden_id(self.tokenizer, mark).map_or_else(|| quoted(mark), |id| format!("<[{id}]>"))
    }

    /// A rule for any text of the terminal `body` up to and with a mark.
    fn until(&mut self, rule: &str, body: &str, mark: &str) {
        match hidden_id(self.tokenizer, mark) {
            Some(id) => self.line(format_args!("{rule}: {body}? <[{id}]>")),
            None => self.line(format_args!("{rule}[suffix={}]: {body}", quoted(mark))),
        }
    }

    fn tags(&mut self, thinks: bool, calls: Option<CallForm>) -> Result<(), String> {
        let Rules { tools, schema, opens_thought } = self.rules;
        let has_calls = !tools.callable.is_empty();
        // Free text has its own space.
        let gap = if schema.is_some() || tools.required { format!("{GAP}?") } else { String::new() };
        match (thinks, *opens_thought) {
            (true, true) => self.line(format_args!("start: thought {gap} body")),
            (true, false) => {
                let open = self.mark(MARKS[0]);
                self.line(format_args!("start: body | {open} thought {gap} body"));
            }
            (false, _) => self.line(format_args!("start: body")),
        }
        if thinks {
            self.line(format_args!("ANY: /(?s:.*)/"));
            self.until("thought", "ANY", CLOSE_THOUGHT);
        }
        let open = self.mark(OPEN_CALL);
        match (has_calls, schema.is_some(), tools.required) {
            (false, ..) => self.line(format_args!("body: answer")),
            (true, _, true) => self.line(format_args!("body: {open} calls")),
            (true, true, false) => self.line(format_args!("body: answer | {open} calls")),
            (true, false, false) => {
                // Text that may begin like a thought would make a call of what the thought only mentions.
                let no_thought = if thinks { r"& ~/\s*<think>(?s:.*)/" } else { "" };
                self.line(format_args!("LEAD: /(?s:.*)/ {no_thought}"));
                self.line(format_args!("TEXT: /(?s:.+)/ & ~/(?s:.*){OPEN_CALL}(?s:.*)/ {no_thought}"));
                self.until("lead", "LEAD", OPEN_CALL);
                self.line(format_args!("body: TEXT? | lead calls"));
            }
        }
        if let (true, Some(form)) = (has_calls, calls) {
            let more = if tools.parallel { format!("(\"\\n\" {open} call)*") } else { String::new() };
            self.line(format_args!("calls: call {more}"));
            let close = self.mark(CLOSE_CALL);
            let names: Vec<String> = (0..tools.callable.len()).map(|i| format!("call_{i}")).collect();
            self.line(format_args!("call: ({}) {close}", names.join(" | ")));
            for (i, tool) in tools.callable.iter().enumerate() {
                match form {
                    CallForm::Json => self.json_call(i, tool),
                    CallForm::Tags => self.tag_call(i, tool)?,
                }
            }
        }
        Ok(())
    }

    fn json_call(&mut self, i: usize, tool: &Tool) {
        let (before, after) = json_call::layout(&tool.name);
        let (before, after, arguments) = (quoted(&before), quoted(after), json_value(&tool.parameters));
        self.line(format_args!("call_{i}: {before} arguments_{i} {after}\narguments_{i}: {arguments}"));
    }

    /// Arguments come in the order of the schema, as in JSON.
    fn tag_call(&mut self, i: usize, tool: &Tool) -> Result<(), String> {
        use tag_call::{END_FUNCTION, END_HEAD, END_VALUE, FUNCTION, PARAMETER};
        let mut parts = vec![quoted(&format!("\n{FUNCTION}{}{END_HEAD}", tool.name))];
        for (j, argument) in tool.arguments.iter().enumerate() {
            if argument.name.contains(['>', '\n']) {
                return Err(format!("{}: an argument's name may not have > or line breaks with this model", tool.name));
            }
            let optional = if argument.required { "" } else { "?" };
            parts.push(format!("argument_{i}_{j}{optional}"));
            let head = quoted(&format!("{PARAMETER}{}{END_HEAD}", argument.name));
            let end = quoted(END_VALUE);
            let value = match &argument.value {
                ArgumentValue::Text | ArgumentValue::Any => "text_value".to_owned(),
                ArgumentValue::OneOf(texts) => {
                    let texts: Vec<String> = texts.iter().map(|text| quoted(&format!("{text}{END_VALUE}"))).collect();
                    format!("({})", texts.join(" | "))
                }
                ArgumentValue::Json(schema) => format!("value_{i}_{j} {end}\nvalue_{i}_{j}: {}", json_value(schema)),
            };
            self.line(format_args!("argument_{i}_{j}: {head} {value}"));
        }
        parts.push(quoted(END_FUNCTION));
        self.line(format_args!("call_{i}: {}", parts.join(" ")));
        if i == 0 {
            self.line(format_args!("text_value[suffix={}]: /(?s:.*)/", quoted(END_VALUE)));
        }
        Ok(())
    }

    /// Any number of thoughts and remarks, then an answer or a call.
    fn channels(&mut self) {
        let Rules { tools, schema, .. } = self.rules;
        let [channel, message, constrain] = [CHANNEL, MESSAGE, CONSTRAIN].map(|mark| self.mark(mark));
        let mut last = Vec::new();
        if !tools.required {
            let body = if schema.is_some() { "answer" } else { "ANY?" };
            self.line(format_args!("final: {channel} \"final\" {message} {body}"));
            last.push("final".to_owned());
        }
        for (i, tool) in tools.callable.iter().enumerate() {
            let name = &tool.name;
            let (to, commentary_to) =
                (quoted(&format!(" to={FUNCTIONS}{name}")), quoted(&format!("commentary to={FUNCTIONS}{name}")));
            self.line(format_args!(
                "call_{i}: ({to} {channel} \"commentary\" | {channel} {commentary_to}) (\" \"? {constrain} \"json\" | \" json\")? {message} arguments_{i}"
            ));
            self.line(format_args!("arguments_{i}: {}", json_value(&tool.parameters)));
            last.push(format!("call_{i}"));
        }
        self.line(format_args!("start: remark* ({})", last.join(" | ")));
        self.line(format_args!(
            "remark: {channel} (\"analysis\" | \"commentary\") {message} body {} \"assistant\"",
            self.mark(START)
        ));
        self.line(format_args!("ANY: /(?s:.*)/"));
        self.until("body", "ANY", END);
    }
}

/// A value of a schema. The space in it is ours to limit, whatever the schema says.
fn json_value(schema: &Value) -> String {
    let mut schema = schema.clone();
    match &mut schema {
        Value::Object(map) => {
            map.insert("x-guidance".to_owned(), json!({"whitespace_pattern": JSON_SPACE}));
        }
        // `true`: anything.
        _ => schema = json!({"x-guidance": {"whitespace_pattern": JSON_SPACE}}),
    }
    format!("%json {schema}")
}

/// A text in the grammar: as in JSON.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
