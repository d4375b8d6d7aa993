//! Clients that dawdle, ask for too much, or come from elsewhere; and who comes first.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Server, read_reply};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const PATIENT: Duration = Duration::from_secs(1);

/// How long the server leaves a connection open, and what it sends; a reset is an end too.
fn until_closed(mut stream: TcpStream) -> (Duration, String) {
    let (start, mut bytes) = (Instant::now(), Vec::new());
    if let Err(e) = stream.read_to_end(&mut bytes) {
        assert_eq!(e.kind(), ErrorKind::ConnectionReset, "{e}");
    }
    (start.elapsed(), String::from_utf8_lossy(&bytes).into_owned())
}

#[test]
fn a_request_has_to_come_in_time() {
    let server = Server::start(&["--patience", "1"]);
    // Nothing, half a head, and an answered connection that idles.
    for head in [
        "",
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow",
        "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ] {
        let mut stream = server.connect();
        stream.write_all(head.as_bytes()).expect("it is sent");
        let (time, reply) = until_closed(stream);
        assert!(time >= PATIENT / 2 && time < PATIENT * 8, "{head:?}: {time:?}");
        assert_eq!(reply.contains("200 OK"), head.starts_with("GET"), "{head:?}: {reply}");
    }
    // Half a body.
    let mut stream = server.connect();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{";
    stream.write_all(head.as_bytes()).expect("it is sent");
    let (time, reply) = until_closed(stream);
    assert!(time >= PATIENT / 2 && time < PATIENT * 8 && reply.starts_with("HTTP/1.1 408"), "{time:?}: {reply}");
    server.ok(COMPLETIONS, &json!({"prompt": "Ge1:1", "max_tokens": 1}));
}

#[test]
fn a_head_has_a_size() {
    let server = Server::start(&[]);
    let mut stream = server.connect();
    let head = format!("GET /health HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "y".repeat(256 << 10));
    stream.write_all(head.as_bytes()).ok();
    let (_, reply) = until_closed(stream);
    assert!(!reply.contains("200 OK"), "{reply}");
    assert_eq!(server.get("/health").status, 200);
}

/// A client that takes nothing of its reply loses the connection, and its slot is free long before.
#[test]
fn a_reader_has_to_read() {
    let server = Server::start(&["--patience", "1", "--slots", "8"]);
    let body = json!({
        "messages": [{"role": "user", "content": "x"}], "stream": true, "n": 8, "max_tokens": 1500, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 20,
    });
    let mut stream = server.open("POST", CHAT, "application/json", &body.to_string());
    server.wait_for("zinc_slots_used", |n| n == 8);
    let start = Instant::now();
    while server.metric("zinc_slots_used") > 0 {
        assert!(start.elapsed() < Duration::from_secs(120), "the reply does not end");
        thread::sleep(Duration::from_millis(50));
    }
    thread::sleep(PATIENT * 3);
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).ok();
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("data: ") && !text.contains("[DONE]"), "{} bytes came, to the end", bytes.len());
    server.ok(COMPLETIONS, &json!({"prompt": "Ge1:1", "max_tokens": 1}));
}

/// B43: more requests than slots are served in order of arrival.
#[test]
fn b43_who_comes_first_is_served_first() {
    let server = Server::start(&["--slots", "1", "--queue", "16"]);
    let long = json!({"prompt": "Ge1:1", "max_tokens": 4000, "ignore_eos": true, "stream": true}).to_string();
    let running = server.open("POST", COMPLETIONS, "application/json", &long);
    server.wait_for("zinc_slots_used", |n| n == 1);
    // The later ones are shorter: whoever let short ones pass would be found out.
    let waiting: Vec<TcpStream> = (0..8)
        .map(|i| {
            let body = json!({"prompt": "Ge1:1", "max_tokens": 60 - 7 * i, "temperature": 0}).to_string();
            let stream = server.open("POST", COMPLETIONS, "application/json", &body);
            server.wait_for("zinc_requests_queued", |n| n == i + 1);
            stream
        })
        .collect();
    drop(running);
    let ends: Vec<Instant> = thread::scope(|scope| {
        let clients: Vec<_> = waiting
            .into_iter()
            .map(|stream| {
                scope.spawn(|| {
                    assert_eq!(read_reply(stream).status, 200);
                    Instant::now()
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().expect("a reply")).collect()
    });
    assert!(ends.is_sorted(), "{ends:?}");
}

fn get(server: &Server, path: &str, headers: &str) -> String {
    let mut stream = server.connect();
    stream.write_all(format!("{path} HTTP/1.1\r\nconnection: close\r\n{headers}\r\n").as_bytes()).expect("it is sent");
    until_closed(stream).1
}

#[test]
fn a_page_of_another_site_gets_nothing() {
    let server = Server::start(&["--allow-host", "box.example"]);
    for (host, status) in
        [("localhost:80", "200"), ("127.0.0.1", "200"), ("box.example", "200"), ("evil.example", "421")]
    {
        let reply = get(&server, "GET /v1/models", &format!("host: {host}\r\norigin: http://evil.example\r\n"));
        assert!(reply.starts_with(&format!("HTTP/1.1 {status}")), "{host}: {reply}");
        assert!(!reply.contains("access-control-allow-origin"), "{reply}");
    }
    // With a key the name does not matter: the page does not know the key.
    let server = Server::start(&["--api-key", "k"]);
    assert!(get(&server, "GET /v1/models", "host: evil.example\r\n").starts_with("HTTP/1.1 401"));
    assert!(
        get(&server, "GET /v1/models", "host: a.example\r\nauthorization: Bearer k\r\n").starts_with("HTTP/1.1 200")
    );
}

#[test]
fn cors_is_for_the_origins_that_were_named() {
    let server = Server::start(&["--cors", "https://good.example", "--api-key", "k"]);
    let ask = |origin: &str| {
        let headers = format!(
            "host: localhost\r\norigin: {origin}\r\naccess-control-request-method: POST\r\n\
             access-control-request-headers: content-type,authorization\r\n"
        );
        get(&server, "OPTIONS /v1/chat/completions", &headers).to_ascii_lowercase()
    };
    let good = ask("https://good.example");
    assert!(
        good.starts_with("http/1.1 200") && good.contains("access-control-allow-origin: https://good.example"),
        "{good}"
    );
    assert!(good.contains("authorization") && good.contains("post"), "{good}");
    assert!(!ask("https://evil.example").contains("access-control-allow-origin"));
}
