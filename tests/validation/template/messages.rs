//! Contents of every form that clients send.

use host::chat::{Chat, Message, Template, TemplateError};
use serde_json::{Value as Json, json};

use super::{MARKERS, data, render, special};

#[test]
fn b38_parts_are_the_same_as_a_string() {
    let sources =
        [data("templates/chatml-think.jinja"), data("templates/headers.jinja"), data("templates/channels.jinja")];
    for source in sources {
        let template = Template::new(&source, special(&MARKERS)).expect("parses");
        for role in ["system", "user", "assistant"] {
            let text = |content: Json| {
                let messages = json!([{"role": role, "content": content}, {"role": "user", "content": "u"}]);
                let messages = Message::parse_all(&messages).expect("valid");
                template.render(&Chat { messages: &messages, ..Chat::default() }).expect("renders").text()
            };
            assert_eq!(text(json!([{"type": "text", "text": "Hello"}])), text(json!("Hello")), "{role}");
        }
    }
}

#[test]
fn b38_null_content_with_calls_and_a_tool_answer_in_parts() {
    let messages = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Oslo\"}"}}
        ]},
        {"role": "tool", "tool_call_id": "call12345", "content": [{"type": "text", "text": "minus four"}]},
    ]);
    let messages = Message::parse_all(&messages).expect("valid");
    // A template without tools, and one that tells calls by null content.
    let plain =
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}";
    let null = "{% for m in messages %}{% if m.content is none %}[CALL]{{ m.tool_calls[0].function.name }}\
                {{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let concatenating = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}\
                         {% endfor %}{% endfor %}";
    let files =
        ["chatml-think.jinja", "headers.jinja", "channels.jinja"].map(|name| data(&format!("templates/{name}")));
    for source in files.iter().map(String::as_str).chain([plain, null, concatenating]) {
        let template = Template::new(source, special(&MARKERS)).expect("parses");
        let text = template.render(&Chat { messages: &messages, ..Chat::default() }).expect("renders").text();
        for wanted in ["Weather?", "get_weather", "Oslo", "minus four"] {
            assert!(text.contains(wanted), "{wanted:?} is missing: {text}\n{source}");
        }
    }
}

#[test]
fn b38_templates_that_want_parts_get_parts() {
    let source =
        "{% for m in messages %}{% for part in m.content %}{{ part.type }}:{{ part.text }};{% endfor %}{% endfor %}";
    assert_eq!(render(source, &["a", "b"]).expect("renders"), "text:a;text:b;");
}

#[test]
fn b38_malformed_messages_name_the_place() {
    let cases = [
        (json!([]), "messages"),
        (json!("hi"), "messages"),
        (json!([5]), "messages[0]"),
        (json!([{"content": "a"}]), "messages[0].role"),
        (json!([{"role": "user\n", "content": "a"}]), "messages[0].role"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (
            json!([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[1].content[0]",
        ),
        (json!([{"role": "user", "content": [{"text": "a"}]}]), "messages[0].content[0].type"),
        (json!([{"role": "assistant", "tool_calls": [{}]}]), "messages[0].tool_calls[0]"),
        (
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]),
            "messages[0].tool_calls[0].function.name",
        ),
        (json!([{"role": "user", "content": "a", "name": 5}]), "messages[0].name"),
    ];
    for (messages, wanted) in cases {
        match Message::parse_all(&messages) {
            Err(error @ TemplateError::Message { .. }) => {
                assert!(error.to_string().starts_with(&format!("{wanted}: ")), "{error}");
                assert!(error.is_client_error());
            }
            other => panic!("{messages}: {other:?}"),
        }
    }
    let image = Message::parse_all(&json!([{"role": "user", "content": [{"type": "image_url"}]}]));
    assert!(image.expect_err("no images").to_string().contains("image_url"));
}
