//! Who may use the server, and how it ends.

use std::io::Read;

use serde_json::json;

use crate::client::{Server, read_reply};

#[test]
fn the_key_is_needed_everywhere_but_for_health() {
    let server = Server::start(&["--api-key", "open sesame"]);
    assert_eq!(server.get("/health").status, 200);
    for path in ["/", "/metrics", "/v1/models", "/v1/nothing"] {
        let reply = server.get(path);
        assert_eq!(reply.error(401)["code"], "invalid_api_key", "{path}");
        assert!(reply.header("www-authenticate").is_some());
    }
    let hello = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"] {
        server.refused(path, &hello, 401);
    }
    let server = server.with_key("open sesam");
    server.refused("/v1/chat/completions", &hello, 401);
    let server = server.with_key("open sesame");
    server.ok("/v1/chat/completions", &hello);
    assert_eq!(server.get("/").status, 200);
}

#[test]
fn the_page_reaches_for_nothing_outside() {
    let page = Server::start(&[]).get("/");
    assert!(page.header("content-type").is_some_and(|kind| kind.starts_with("text/html")));
    assert!(page.header("content-security-policy").is_some_and(|policy| policy.contains("default-src 'none'")));
    assert!(page.header("access-control-allow-origin").is_none());
    for outside in ["http://", "https://", "src=", "<link", "@import"] {
        assert!(!page.body.contains(outside), "{outside}");
    }
}

#[test]
fn a_server_that_is_asked_to_end_finishes_its_replies() {
    let mut server = Server::start(&["--alias", "small"]);
    let body = json!({
        "prompt": "Ge1:1", "max_tokens": 600, "temperature": 0, "stream": true, "ignore_eos": true,
    });
    let mut stream = server.open("POST", "/v1/completions", "application/json", &body.to_string());
    let mut first = [0];
    stream.read_exact(&mut first).expect("the reply begins");
    let n = server.metric("zinc_requests_finished_total");
    assert_eq!(n, 0, "the reply is under way");
    server.terminate();
    let mut rest = String::from("H");
    assert_eq!(first, *b"H");
    stream.read_to_string(&mut rest).expect("the reply ends");
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert!(server.wait(), "a clean end");
}

#[test]
fn a_full_queue_turns_clients_away() {
    let server = Server::start(&["--slots", "1", "--queue", "1"]);
    let long = json!({
        "prompt": "Ge1:1", "max_tokens": 4000, "temperature": 0, "stream": true, "ignore_eos": true,
    })
    .to_string();
    let open = || server.open("POST", "/v1/completions", "application/json", &long);
    let running = open();
    server.wait_for("zinc_slots_used", |n| n == 1);
    let waiting = open();
    server.wait_for("zinc_requests_queued", |n| n == 1);
    let turned_away = read_reply(open());
    assert_eq!(turned_away.error(429)["code"], "queue_full");
    assert!(turned_away.header("retry-after").is_some());
    drop((running, waiting));
    server.wait_for("zinc_slots_used", |n| n == 0);
    server.ok("/v1/completions", &json!({"prompt": "Ge1:1", "max_tokens": 1}));
}
