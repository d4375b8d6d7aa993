//! Clients that come together, and clients that leave.

use std::collections::HashSet;
use std::io::Read;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::Server;

const COMPLETIONS: &str = "/v1/completions";

fn endless(stream: bool, prompt: &str) -> String {
    json!({"prompt": prompt, "max_tokens": 4000, "temperature": 0, "ignore_eos": true, "stream": stream}).to_string()
}

fn open(server: &Server, body: &str) -> TcpStream {
    server.open("POST", COMPLETIONS, "application/json", body)
}

/// A new request is served at once, and nothing else is generated.
fn is_free(server: &Server, when: &str) {
    let start = Instant::now();
    server.ok(COMPLETIONS, &json!({"prompt": "Ge1:1", "max_tokens": 1}));
    assert!(start.elapsed() < Duration::from_secs(2), "{when}: {:?}", start.elapsed());
    let generated = server.metric("zinc_generated_tokens_total");
    thread::sleep(Duration::from_millis(100));
    assert_eq!(server.metric("zinc_generated_tokens_total"), generated, "{when}: the slot goes on");
    assert_eq!(server.metric("zinc_kv_pages_used"), 0, "{when}");
}

/// B35.
#[test]
fn b35_a_client_that_goes_away_frees_its_slot() {
    let server = Server::start(&["--slots", "1"]);

    let mut stream = open(&server, &endless(true, "Ge1:1"));
    let mut some = [0; 400];
    stream.read_exact(&mut some).expect("the first chunk");
    drop(stream);
    is_free(&server, "streaming");

    let buffered = open(&server, &endless(false, "Ge1:1"));
    server.wait_for("zinc_slots_used", |n| n == 1);
    drop(buffered);
    is_free(&server, "buffered");

    let computed = server.metric("zinc_prompt_tokens_total");
    let prefilling = open(&server, &endless(false, &"And it came to pass ".repeat(600)));
    server.wait_for("zinc_prompt_tokens_total", |n| n > computed);
    drop(prefilling);
    is_free(&server, "prefilling");

    let running = open(&server, &endless(true, "Ge1:1"));
    server.wait_for("zinc_slots_used", |n| n == 1);
    let queued = open(&server, &endless(true, "Ge1:1"));
    server.wait_for("zinc_requests_queued", |n| n == 1);
    drop(queued);
    server.wait_for("zinc_requests_queued", |n| n == 0);
    drop(running);
    is_free(&server, "queued");
    assert_eq!(server.metric("zinc_requests_cancelled_total"), 5);
}

const PROMPTS: [&str; 8] = [
    "Ge1:1 In the beginning",
    "Ps23:1 The LORD is my shepherd",
    "fn main() {",
    "And it came to pass",
    "/// Returns the number of",
    "impl<T> Iterator for",
    "Ex20:3 Thou shalt",
    "use std::",
];
const LIMITS: [u32; 8] = [1, 2, 3, 5, 8, 40, 80, 160];

fn request(i: usize) -> Value {
    json!({"prompt": PROMPTS[i % 8], "max_tokens": LIMITS[i % 8], "temperature": 0})
}

/// The text of request `i`, every other one streamed, and the ids of its reply.
fn text(server: &Server, i: usize) -> (String, String) {
    if i.is_multiple_of(2) {
        let reply = server.ok(COMPLETIONS, &request(i));
        return (reply["choices"][0]["text"].as_str().expect("a text").to_owned(), reply["id"].to_string());
    }
    let chunks = server.stream(COMPLETIONS, &request(i));
    let ids: HashSet<String> = chunks.iter().map(|chunk| chunk["id"].to_string()).collect();
    assert_eq!(ids.len(), 1, "one id per stream");
    let text = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    (text, ids.into_iter().next().expect("an id"))
}

/// B43.
#[test]
fn b43_parallel_replies_equal_those_of_a_quiet_server() {
    let server = Server::start(&["--slots", "8"]);
    let solo: Vec<String> = (0..8).map(|i| text(&server, i).0).collect();
    let mut ids = HashSet::new();
    for n in [8, 32] {
        let replies: Vec<(String, String)> = thread::scope(|scope| {
            let clients: Vec<_> = (0..n)
                .map(|i| {
                    scope.spawn({
                        let server = &server;
                        move || text(server, i)
                    })
                })
                .collect();
            // Neighbours that are refused, or leave.
            scope.spawn(|| server.refused(COMPLETIONS, &json!({"prompt": [-1]}), 400));
            drop(open(&server, &endless(true, "Ge1:1")));
            clients.into_iter().map(|client| client.join().expect("a reply")).collect()
        });
        for (i, (text, id)) in replies.into_iter().enumerate() {
            assert_eq!(text, solo[i % 8], "request {i} of {n}");
            assert!(ids.insert(id), "ids are unique");
        }
    }
    server.wait_for("zinc_slots_used", |n| n == 0);
}
