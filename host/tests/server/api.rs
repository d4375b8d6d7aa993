//! The API beyond plain text: choices, seeds, log probabilities, embeddings, tokens.

use serde_json::{Value, json};

use crate::client::Server;

#[test]
fn a_seed_repeats_and_choices_differ() {
    let server = Server::start(&[]);
    let body =
        |seed: Value| json!({"prompt": "And it came", "max_tokens": 16, "temperature": 1.5, "n": 3, "seed": seed});
    let reply = server.ok("/v1/completions", &body(7.into()));
    let texts: Vec<&str> = (0..3).filter_map(|i| reply["choices"][i]["text"].as_str()).collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    assert_eq!(server.ok("/v1/completions", &body(7.into()))["choices"], reply["choices"]);
    assert_ne!(server.ok("/v1/completions", &body(8.into()))["choices"], reply["choices"]);
    assert_eq!(reply["usage"]["prompt_tokens"], 3, "the prompt counts once");

    let chunks = server.stream("/v1/completions", &body(7.into()));
    for (i, text) in texts.iter().enumerate() {
        let of_choice = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == i);
        let streamed: String = of_choice.filter_map(|choice| choice["text"].as_str()).collect();
        assert_eq!(streamed, *text, "choice {i}");
    }
}

#[test]
fn log_probabilities_name_the_greedy_token_first() {
    let server = Server::start(&[]);
    let prompt = json!({"prompt": "Ge1:1 In the beginning", "max_tokens": 5, "temperature": 0, "logprobs": 3});
    let reply = server.ok("/v1/completions", &prompt);
    let logprobs = &reply["choices"][0]["logprobs"];
    for i in 0..5 {
        let (token, own) = (logprobs["tokens"][i].as_str().expect("a token"), logprobs["token_logprobs"][i].as_f64());
        let top = logprobs["top_logprobs"][i].as_object().expect("an object");
        assert_eq!(top.len(), 3);
        assert_eq!(top.get(token).and_then(Value::as_f64), own, "{token}");
        assert!(own.is_some_and(|own| own <= 0.0 && top.values().all(|other| other.as_f64() <= Some(own))));
    }
    let chat =
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "logprobs": true, "top_logprobs": 2});
    let whole = server.ok(
        "/v1/chat/completions",
        &json!({"temperature": 0, "messages": chat["messages"], "max_tokens": 5,
        "logprobs": true, "top_logprobs": 2}),
    );
    let mut greedy = chat.clone();
    greedy["temperature"] = 0.into();
    let chunks = server.stream("/v1/chat/completions", &greedy);
    let streamed: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(whole["choices"][0]["logprobs"]["content"], Value::Array(streamed));
}

#[test]
fn embeddings_have_length_one_and_both_encodings() {
    let server = Server::start(&[]);
    let reply = server.ok("/v1/embeddings", &json!({"input": ["In the beginning", "fn main() {", "In the beginning"]}));
    let vector = |i: usize| -> Vec<f64> {
        reply["data"][i]["embedding"].as_array().expect("a list").iter().filter_map(Value::as_f64).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let (a, b, c) = (vector(0), vector(1), vector(2));
    assert!((dot(&a, &a) - 1.0).abs() < 1e-5);
    assert!(dot(&a, &c) > 0.9999 && dot(&a, &b) < 0.99, "{} {}", dot(&a, &c), dot(&a, &b));
    let packed = server.ok("/v1/embeddings", &json!({"input": "In the beginning", "encoding_format": "base64"}));
    let text = packed["data"][0]["embedding"].as_str().expect("a text");
    assert_eq!(text.len(), (a.len() * 4).div_ceil(3) * 4);
    assert_eq!(server.refused("/v1/embeddings", &json!({"input": ""}), 400)["param"], "input");
}

#[test]
fn tokens_there_and_back() {
    let server = Server::start(&["--alias", "small"]);
    let text = "Ge1:1 In the beginning, naïve 👍🏽 日本";
    let tokens = server.ok("/tokenize", &json!({"content": text}))["tokens"].take();
    assert_eq!(server.ok("/detokenize", &json!({"tokens": tokens}))["content"], text);
    assert_eq!(server.refused("/detokenize", &json!({"tokens": [4096]}), 400)["param"], "tokens");
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "small");
    assert_eq!(server.get("/v1/models/small").status, 200);
}
