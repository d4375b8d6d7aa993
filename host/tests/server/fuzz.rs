//! Any body gets an answer: random JSON against the real routes.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Map, Value, json};

use crate::client::Server;

/// Fields that the routes know, so that most of what is drawn means something.
const FIELDS: [&str; 34] = [
    "messages",
    "prompt",
    "input",
    "content",
    "tokens",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "ignore_eos",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "chat_template_kwargs",
    "reasoning_effort",
    "echo",
    "best_of",
    "encoding_format",
    "add_special",
];
/// Words with a meaning somewhere.
const WORDS: [&str; 24] = [
    "",
    "user",
    "assistant",
    "tool",
    "text",
    "type",
    "role",
    "content",
    "function",
    "name",
    "parameters",
    "object",
    "json_schema",
    "schema",
    "json_object",
    "required",
    "auto",
    "properties",
    "pattern",
    "$ref",
    "#",
    "include_usage",
    "float",
    "Ge1:1",
];
const ROUTES: [&str; 5] = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"];

fn word() -> impl Strategy<Value = String> {
    prop_oneof![4 => proptest::sample::select(&WORDS[..]).prop_map(str::to_owned), 1 => ".{0,12}"]
}

fn any_json() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        (-3i64..6).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0.0..2.0f64).prop_map(Value::from),
    ];
    let leaf = prop_oneof![
        1 => Just(Value::Null),
        2 => any::<bool>().prop_map(Value::from),
        3 => number,
        4 => word().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::vec((word(), inner), 0..4)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// A good body of each route; some of its fields are drawn anew.
fn good(route: usize) -> Value {
    match route {
        0 => json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        1 => json!({"prompt": "Ge1:1", "max_tokens": 2}),
        2 => json!({"input": "Ge1:1"}),
        3 => json!({"content": "Ge1:1"}),
        _ => json!({"tokens": [300]}),
    }
}

fn request() -> impl Strategy<Value = (usize, Value)> {
    let field = prop_oneof![
        6 => proptest::sample::select(&FIELDS[..]).prop_map(str::to_owned),
        1 => word(),
    ];
    let changes = proptest::collection::vec((field, any_json()), 0..4);
    (0..ROUTES.len(), changes, prop_oneof![12 => Just(None), 1 => any_json().prop_map(Some)]).prop_map(
        |(route, changes, instead)| {
            let mut body = good(route);
            changes.into_iter().for_each(|(name, value)| body[name] = value);
            (route, instead.unwrap_or(body))
        },
    )
}

#[test]
fn no_body_breaks_the_server() {
    // A small context, so that a reply without a limit is short.
    let server = Server::start(&["--ctx", "64", "--slots", "2", "--queue", "256"]);
    let mut runner = TestRunner::new(Config { cases: 600, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&request(), |(route, body)| {
        let reply = server.post(ROUTES[route], &body);
        prop_assert!(matches!(reply.status, 200 | 400), "{} {body}: {} {}", ROUTES[route], reply.status, reply.body);
        if reply.status == 400 {
            let error = reply.error(400);
            prop_assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
        } else {
            // A stream or JSON; either has to be whole.
            let streamed = reply.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
            let failed = if streamed {
                reply.chunks().iter().any(|chunk| chunk.get("error").is_some())
            } else {
                reply.json().get("error").is_some()
            };
            prop_assert!(!failed, "{body}: {}", reply.body);
        }
        Ok(())
    });
    if let Err(e) = outcome {
        panic!("{e}");
    }
    server.wait_for("zinc_slots_used", |n| n == 0);
    assert_eq!(server.metric("zinc_requests_failed_total"), 0);
    server.ok("/v1/completions", &good(1));
}
