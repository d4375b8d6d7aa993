//! What the text of a reply is, streamed and whole.

use serde_json::{Value, json};

use crate::client::Server;

const GENESIS: &str = "Ge1:1 In the beginning";
/// Its greedy continuation, nine tokens.
const CREATED: &str = " God created the heaven and the earth.\nGe";

/// The texts of a completion's chunks, and why it ended.
fn pieces(chunks: &[Value]) -> (Vec<String>, String) {
    let text = |chunk: &Value| chunk["choices"][0]["text"].as_str().map(str::to_owned);
    let reasons: Vec<&str> = chunks.iter().filter_map(|c| c["choices"][0]["finish_reason"].as_str()).collect();
    assert_eq!(reasons.len(), 1, "one reason per stream: {chunks:?}");
    (chunks.iter().filter_map(text).collect(), reasons[0].to_owned())
}

/// A completion, streamed and whole, which have to be equal: its pieces and its finish reason.
fn both(server: &Server, body: &Value) -> (Vec<String>, String) {
    let whole = server.ok("/v1/completions", body);
    let (pieces, reason) = pieces(&server.stream("/v1/completions", body));
    assert_eq!(whole["choices"][0]["text"], pieces.concat(), "{body}");
    assert_eq!(whole["choices"][0]["finish_reason"], reason, "{body}");
    (pieces, reason)
}

/// B32. The bias and the penalty together force the four byte tokens of one emoji, in order.
#[test]
fn b32_a_character_spread_over_tokens_is_never_cut() {
    let server = Server::start(&[]);
    let ids = server.ok("/tokenize", &json!({"content": "a👍"}))["tokens"].as_array().expect("a list")[1..].to_vec();
    assert_eq!(ids.len(), 4, "the vocabulary has no token for it: {ids:?}");
    let bias: serde_json::Map<_, _> =
        ids.iter().zip([100, 75, 50, 25]).map(|(id, bias)| (id.to_string(), bias.into())).collect();
    let body = json!({
        "prompt": GENESIS, "temperature": 0, "max_tokens": 4, "logit_bias": bias, "frequency_penalty": 100,
    });
    assert_eq!(both(&server, &body), (vec!["👍".to_owned(), String::new()], "length".to_owned()));

    // Cut off in the middle: what there is comes out once, at the end.
    let mut cut = body.clone();
    cut["max_tokens"] = 3.into();
    assert_eq!(both(&server, &cut).0.concat(), "\u{fffd}");

    // With log probabilities every token is reported, and `bytes` tell the halves apart.
    let mut logprobs = json!({"messages": [{"role": "user", "content": "x"}], "logprobs": true});
    for key in ["temperature", "max_tokens", "logit_bias", "frequency_penalty"] {
        logprobs[key] = body[key].clone();
    }
    let reply = server.ok("/v1/chat/completions", &logprobs);
    assert_eq!(reply["choices"][0]["message"]["content"], "👍");
    let tokens = reply["choices"][0]["logprobs"]["content"].as_array().expect("a list");
    let bytes: Vec<u64> =
        tokens.iter().flat_map(|t| t["bytes"].as_array().expect("bytes")).filter_map(Value::as_u64).collect();
    assert_eq!(bytes, "👍".bytes().map(u64::from).collect::<Vec<_>>());
}

/// B34.
#[test]
fn b34_stop_strings_over_token_borders() {
    let server = Server::start(&[]);
    let reply = |stop: Value| {
        let (pieces, reason) =
            both(&server, &json!({"prompt": GENESIS, "temperature": 0, "max_tokens": 9, "stop": stop}));
        (pieces.concat(), reason)
    };
    let end = |text: &str, reason: &str| (text.to_owned(), reason.to_owned());
    assert_eq!(reply(Value::Null), end(CREATED, "length"));
    assert_eq!(reply(json!(["ted the hea"])), end(" God crea", "stop"), "over borders");
    assert_eq!(reply(json!(["reat"])), end(" God c", "stop"), "inside a token");
    assert_eq!(reply(json!(["earth.\nGex"])), end(CREATED, "length"), "the held tail is part of the reply");
    assert_eq!(reply(json!(["earth", "the heaven"])), end(" God created ", "stop"), "the earliest wins");
    assert_eq!(reply(json!(" the")), end(" God created", "stop"), "a bare string");
    assert_eq!(reply(json!("")), end(CREATED, "length"), "an empty one is ignored");
    assert_eq!(reply(json!([""])), end(CREATED, "length"));
    let error = server.refused("/v1/completions", &json!({"prompt": "a", "stop": [1]}), 400);
    assert_eq!(error["param"], "stop");
}

/// B41.
#[test]
fn b41_limits_reasons_and_usage() {
    let server = Server::start(&[]);
    let chat = |n: i64| json!({"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": n});
    let whole = server.ok("/v1/chat/completions", &chat(3));
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 3);

    let plain = server.stream("/v1/chat/completions", &chat(3));
    assert!(plain.iter().all(|chunk| chunk.get("usage").is_none() && chunk["choices"][0].is_object()));
    let roles = plain.iter().map(|c| c["choices"][0]["delta"].get("role").is_some()).collect::<Vec<_>>();
    assert!(roles[0] && roles.iter().filter(|role| **role).count() == 1, "{plain:?}");
    assert!(plain.iter().all(|chunk| chunk["id"] == plain[0]["id"]));
    let reasons: Vec<_> = plain.iter().filter_map(|c| c["choices"][0]["finish_reason"].as_str()).collect();
    assert_eq!(reasons, ["length"]);

    let mut counted = chat(3);
    counted["stream_options"] = json!({"include_usage": true});
    let mut counted = server.stream("/v1/chat/completions", &counted);
    let last = counted.pop().expect("a chunk");
    assert_eq!(last["choices"], json!([]));
    for key in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(last["usage"][key], whole["usage"][key], "{key}");
    }
    assert!(counted.iter().all(|chunk| chunk.get("usage").is_none()));

    // The end of a text, forced: it is no part of the reply.
    let eos = server.ok("/tokenize", &json!({"content": "<|endoftext|>", "parse_special": true}));
    let eos = eos["tokens"][0].to_string();
    let ended = json!({"prompt": GENESIS, "temperature": 0, "max_tokens": 9, "logit_bias": {eos: 100}});
    assert_eq!(both(&server, &ended), (vec![String::new()], "stop".to_owned()));

    for n in [0, -1] {
        let error = server.refused("/v1/chat/completions", &chat(n), 400);
        assert_eq!(error["param"], "max_tokens");
    }
}
