//! Requests that cannot be served.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::Server;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn user(content: Value) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4})
}

/// B37.
#[test]
fn b37_a_prompt_longer_than_the_context() {
    let server = Server::start(&["--ctx", "64"]);
    let mut long = user("In the beginning ".repeat(60).into());
    for stream in [false, true] {
        long["stream"] = stream.into();
        let error = server.refused(CHAT, &long, 400);
        assert_eq!(
            (&error["type"], &error["code"]),
            (&json!("invalid_request_error"), &json!("context_length_exceeded"))
        );
        let message = error["message"].as_str().expect("a text");
        let numbers: Vec<u32> =
            message.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect();
        assert!(numbers.len() == 2 && numbers[0] == 64 && numbers[1] > 150, "{message}");
    }
    // Exactly full: nothing can follow.
    let full = server.ok(COMPLETIONS, &json!({"prompt": vec![300; 64]}));
    assert_eq!((&full["choices"][0]["text"], &full["choices"][0]["finish_reason"]), (&json!(""), &json!("length")));
    server.ok(CHAT, &user("Hi".into()));

    let start = Instant::now();
    let error = server.refused(CHAT, &user("x".repeat(524_288).into()), 400);
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

/// B38.
#[test]
fn b38_content_is_a_text_a_list_of_parts_or_null() {
    let server = Server::start(&[]);
    for role in ["system", "developer", "user", "assistant", "tool"] {
        let chat = |content: Value| {
            let first = json!({"role": role, "content": content});
            json!({"messages": [first, {"role": "user", "content": "?"}], "temperature": 0, "max_tokens": 8})
        };
        let text = server.ok(CHAT, &chat("Hello".into()));
        let parts = server.ok(CHAT, &chat(json!([{"type": "text", "text": "Hello"}])));
        assert_eq!(text["usage"]["prompt_tokens"], parts["usage"]["prompt_tokens"], "{role}");
        assert_eq!(text["choices"], parts["choices"], "{role}");
    }
    let tool_chat = |result: &str| {
        json!({"messages": [
            {"role": "user", "content": "How warm is it?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "warmth", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": result}]},
        ], "max_tokens": 1})
    };
    let tokens = |chat: &Value| server.ok(CHAT, chat)["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert!(tokens(&tool_chat("20 degrees, and rising")) > tokens(&tool_chat("20")) + 3, "the result is in the prompt");

    let image = server.refused(CHAT, &user(json!([{"type": "image_url", "image_url": {"url": "data:"}}])), 400);
    assert!(image["message"].as_str().is_some_and(|message| message.contains("image_url")), "{image}");
    for (messages, param) in [
        (json!([]), "messages"),
        (json!(null), "messages"),
        (json!([{"content": "Hi"}]), "messages[0].role"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content"),
        (json!([{"role": "king", "content": "Hi"}]), "messages[0].role"),
    ] {
        assert_eq!(server.refused(CHAT, &json!({"messages": messages}), 400)["param"], param);
    }
}

/// B40.
#[test]
fn b40_wild_ids_and_empty_prompts() {
    let server = Server::start(&[]);
    let n_vocab = 4096;
    let good = json!({"prompt": "Ge1:1 In the beginning", "temperature": 0, "max_tokens": 4});
    let want = server.ok(COMPLETIONS, &good)["choices"].take();
    for prompt in [json!([-1]), json!([n_vocab]), json!([4_294_967_296_u64]), json!([1.5]), json!([[1], [n_vocab]])] {
        assert_eq!(server.refused(COMPLETIONS, &json!({"prompt": prompt}), 400)["param"], "prompt");
        assert_eq!(server.ok(COMPLETIONS, &good)["choices"], want, "after {prompt}");
    }
    for prompt in [json!(""), json!([]), json!([""]), json!([[]]), json!(null), json!(5), json!({}), json!([null])] {
        assert_eq!(server.refused(COMPLETIONS, &json!({"prompt": prompt}), 400)["param"], "prompt", "{prompt}");
    }
    server.ok(CHAT, &user("".into()));
    server.ok(COMPLETIONS, &json!({"prompt": [n_vocab - 1], "max_tokens": 1}));
    assert_eq!(server.ok(COMPLETIONS, &good)["choices"], want);
}

#[test]
fn a_field_of_the_wrong_type_is_named_and_null_is_absent() {
    // Short, because without max_tokens a reply goes on to its end.
    let server = Server::start(&["--ctx", "64"]);
    let with = |key: &str, value: Value| {
        let mut body = user("Hi".into());
        body[key] = value;
        body
    };
    for (key, value) in [
        ("temperature", json!("hot")),
        ("temperature", json!(-1)),
        ("top_p", json!(2)),
        ("top_k", json!(1.5)),
        ("max_tokens", json!("3")),
        ("max_completion_tokens", json!([])),
        ("n", json!(0)),
        ("n", json!(1000)),
        ("seed", json!("lucky")),
        ("stream", json!("yes")),
        ("stop", json!(5)),
        ("logit_bias", json!([1])),
        ("logit_bias", json!({"4096": 1})),
        ("logit_bias", json!({"1": "much"})),
        ("logprobs", json!(3)),
        ("top_logprobs", json!(50)),
        ("model", json!(5)),
        ("stream_options", json!(true)),
        ("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        ("response_format", json!([])),
        ("tool_choice", json!("required")),
        ("parallel_tool_calls", json!("no")),
    ] {
        let error = server.refused(CHAT, &with(key, value.clone()), 400);
        assert_eq!(error["param"], key, "{value}");
        server.ok(CHAT, &with(key, Value::Null));
    }
    let error = server.refused(CHAT, &with("stream_options", json!({"include_usage": 1})), 400);
    assert_eq!(error["param"], "stream_options.include_usage");
    server.ok(CHAT, &with("no_such_field", json!({"a": 1})));
}

#[test]
fn every_refusal_has_the_same_form() {
    let server = Server::start(&[]);
    server.get("/v1/nothing").error(404);
    server.get(CHAT).error(405);
    server.get("/v1/models/nothing").error(404);
    server.post_text(CHAT, "{").error(400);
    server.post_text(CHAT, "[]").error(400);
    server.post_text(CHAT, &format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000))).error(400);
    server.post_text(CHAT, &" ".repeat((8 << 20) + 1)).error(413);
    let form = server.open("POST", CHAT, "text/plain", &user("Hi".into()).to_string());
    crate::client::read_reply(form).error(415);
}
