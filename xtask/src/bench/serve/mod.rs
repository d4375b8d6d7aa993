//! `cargo xtask bench --serve`: the server under load, on loopback.
//!
//! Clients send requests of mixed lengths, whole and streamed, go away in every phase of one, and send what is no
//! request. Every reply that is waited for has to equal the one that a quiet server gave, up to a near tie: a device whose
//! kernels depend on the size of a batch may choose the other one there. In the end nothing may be left over: no slot, no
//! page, no memory.

mod client;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// How much.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) clients: usize,
    pub(crate) requests: usize,
    pub(crate) slots: usize,
}

/// Beginnings that a small model goes on from in ways of its own.
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
const LIMITS: [u32; 6] = [1, 2, 5, 16, 48, 120];
const KINDS: usize = PROMPTS.len() * LIMITS.len();
const COMPLETIONS: &str = "/v1/completions";
/// Growth of memory between a quarter of the requests and the end that is no leak: buffers that grow to their largest.
const MAX_GROWTH_BYTES: u64 = 24 << 20;
/// The same with a GPU, whose captured steps are kept for many shapes of batch, up to a number.
const MAX_GROWTH_WITH_GRAPHS: u64 = MAX_GROWTH_BYTES + (72 << 20);

/// Two tokens whose log probabilities are closer may change places by rounding.
const NEAR_TIE: f64 = 0.02;

/// A reply of a quiet server.
struct Solo {
    text: String,
    /// Where in the text each token begins, in characters, and how far the next likely one is from it.
    tokens: Vec<(usize, f64)>,
}

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Whole,
    Stream,
    /// Leaves after some of a stream.
    LeaveStream,
    /// Leaves a reply that is not streamed.
    LeaveWhole,
    /// Leaves during a long prompt.
    LeavePrompt,
    /// Leaves at once, most likely out of the queue.
    LeaveQueue,
    Malformed,
}

/// The server under test; it dies with this.
struct Server {
    child: Child,
    address: SocketAddr,
}

/// What came of it.
#[derive(Default)]
pub(crate) struct Report {
    /// Replies that were compared.
    pub(crate) compared: usize,
    /// Those of them that are different from a near tie on.
    pub(crate) tied: usize,
    pub(crate) left: usize,
    pub(crate) refused: usize,
    /// Times that a client was told to come back later.
    pub(crate) turned_away: usize,
    first_token_s: Vec<f64>,
    seconds: f64,
    /// After a quarter of the requests, and in the end; where the system says.
    memory_bytes: Option<(u64, u64)>,
}

/// Runs the load.
///
/// # Errors
/// A reply was lost, wrong or mixed up, or something is left over.
pub(crate) fn run(host: &Path, model: &Path, device: &str, load: Load) -> Result<Report> {
    let server = Server::start(host, model, device, load)?;
    let solo = (0..KINDS).map(|kind| server.solo(kind)).collect::<Result<Vec<_>>>()?;
    let next = AtomicUsize::new(0);
    let report = Mutex::new(Report::default());
    let start = Instant::now();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..load.clients)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        if i >= load.requests {
                            return Ok(());
                        }
                        if i == load.requests / 4 {
                            let now = server.memory_bytes();
                            report.lock().expect("no client panics").memory_bytes = now.map(|bytes| (bytes, 0));
                        }
                        server.act(i, &solo, &report).with_context(|| format!("request {i}, {:?}", deed(i)))?;
                    }
                })
            })
            .collect();
        clients.into_iter().try_for_each(|client| client.join().expect("no client panics"))
    })?;
    let mut report = report.into_inner().expect("no client panics");
    report.seconds = start.elapsed().as_secs_f64();
    server.is_idle()?;
    if let (Some((before, after)), Some(now)) = (&mut report.memory_bytes, server.memory_bytes()) {
        *after = now;
        let most = if device == "cpu" { MAX_GROWTH_BYTES } else { MAX_GROWTH_WITH_GRAPHS };
        ensure!(now < *before + most, "memory grew from {before} to {now} bytes");
    }
    ensure!(server.solo(0)?.text == solo[0].text, "the server answers differently now");
    Ok(report)
}

/// Mixes the deeds, the same way in every run.
fn deed(i: usize) -> Deed {
    match (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32 & 15 {
        0..5 => Deed::Whole,
        5..10 => Deed::Stream,
        10 => Deed::LeaveStream,
        11 => Deed::LeaveWhole,
        12 => Deed::LeavePrompt,
        13 => Deed::LeaveQueue,
        _ => Deed::Malformed,
    }
}

fn body(kind: usize, stream: bool) -> String {
    let (prompt, limit) = (PROMPTS[kind % PROMPTS.len()], LIMITS[kind / PROMPTS.len() % LIMITS.len()]);
    json!({"prompt": prompt, "max_tokens": limit, "temperature": 0, "stream": stream}).to_string()
}

/// A request that would go on for long.
fn endless(prompt: &str, stream: bool) -> String {
    json!({"prompt": prompt, "max_tokens": 2000, "temperature": 0, "ignore_eos": true, "stream": stream}).to_string()
}

/// What is no request, and the statuses that it may get; none: the connection may simply end.
fn malformed(i: usize) -> (Vec<u8>, &'static [u16]) {
    let post = |path: &str, body: &str| {
        format!("POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
    };
    match i % 8 {
        0 => (post(COMPLETIONS, "{\"prompt\": "), &[400]),
        1 => (post(COMPLETIONS, "{\"prompt\": [-1]}"), &[400]),
        2 => (post(COMPLETIONS, "{\"prompt\": \"x\", \"temperature\": \"hot\"}"), &[400]),
        3 => (post("/v1/chat/completions", "{\"messages\": []}"), &[400]),
        4 => (post(COMPLETIONS, &json!({"prompt": vec![5; 100_000]}).to_string()), &[400]),
        5 => (post("/v1/nothing", "{}"), &[404]),
        6 => (b"\x16\x03\x01 hello\r\n\r\n".to_vec(), &[400]),
        _ => (
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 5\r\n\r\nab".to_vec(),
            &[200, 400, 408],
        ),
    }
}

impl Server {
    fn start(host: &Path, model: &Path, device: &str, load: Load) -> Result<Server> {
        let mut command = Command::new(host);
        command.args(["serve", "--port", "0", "--ctx", "4096", "--device", device, "-m"]).arg(model);
        command.args(["--slots", &load.slots.to_string(), "--queue", &(load.clients / 2).to_string()]);
        // On a GPU int8 activations depend on how many rows a step has, as far as they are rounded.
        command.args(["--activations", "f32", "--kv", "f32"]);
        command.env_remove("ZINC_API_KEY").stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot run {}", host.display()))?;
        let mut lines = BufReader::new(child.stderr.take().context("stderr is a pipe")?).lines();
        let mut said = String::new();
        while let Some(Ok(line)) = lines.next() {
            if let Some(address) = line.strip_prefix("listening on http://") {
                let address = address.parse()?;
                // Nobody may block on a full pipe.
                thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("server: {line}")));
                return Ok(Server { child, address });
            }
            said.push_str(&line);
        }
        child.wait()?;
        bail!("the server does not start: {said}")
    }

    fn act(&self, i: usize, solo: &[Solo], report: &Mutex<Report>) -> Result<()> {
        let (kind, deed) = (i % KINDS, deed(i));
        let count = |change: &dyn Fn(&mut Report)| change(&mut report.lock().expect("no client panics"));
        let send = |body: &str| client::send(self.address, "POST", COMPLETIONS, body);
        match deed {
            Deed::Whole | Deed::Stream => loop {
                let start = Instant::now();
                let reply = client::receive(send(&body(kind, deed == Deed::Stream))?)?;
                if reply.status == 429 {
                    count(&|report| report.turned_away += 1);
                    thread::sleep(Duration::from_millis(20));
                    continue;
                }
                ensure!(reply.status == 200, "status {}", reply.status);
                let (text, first) =
                    if deed == Deed::Stream { streamed(reply, start)? } else { (text(&reply.json()?)?, None) };
                let same = text == solo[kind].text;
                ensure!(
                    same || solo[kind].is_tied_with(&text),
                    "the reply is {text:?}, alone it was {:?}",
                    solo[kind].text
                );
                count(&|report| {
                    report.compared += 1;
                    report.tied += usize::from(!same);
                    report.first_token_s.extend(first);
                });
                return Ok(());
            },
            Deed::LeaveStream => {
                let reply = client::receive(send(&endless(PROMPTS[i % 8], true))?)?;
                if reply.status == 200 {
                    let mut n = 0;
                    reply.events(|_| {
                        n += 1;
                        Ok(n < i % 20)
                    })?;
                }
            }
            Deed::LeaveWhole => {
                let _reply = send(&endless(PROMPTS[i % 8], false))?;
                thread::sleep(Duration::from_millis(i as u64 % 50));
            }
            Deed::LeavePrompt => {
                let _reply = send(&endless(&format!("{i} And it came to pass ").repeat(150), true))?;
                thread::sleep(Duration::from_millis(i as u64 % 30));
            }
            Deed::LeaveQueue => drop(send(&endless(PROMPTS[i % 8], true))?),
            Deed::Malformed => {
                let (bytes, statuses) = malformed(i / 16 + i);
                let stream = client::send_raw(self.address, &bytes)?;
                stream.shutdown(std::net::Shutdown::Write).ok();
                if let Ok(reply) = client::receive(stream) {
                    ensure!(
                        statuses.contains(&reply.status),
                        "{:?} got {}",
                        String::from_utf8_lossy(&bytes),
                        reply.status
                    );
                }
                count(&|report| report.refused += 1);
                return Ok(());
            }
        }
        count(&|report| report.left += 1);
        Ok(())
    }

    fn solo(&self, kind: usize) -> Result<Solo> {
        let ask = |body: &str| -> Result<Value> {
            let reply = client::receive(client::send(self.address, "POST", COMPLETIONS, body)?)?;
            ensure!(reply.status == 200, "status {}", reply.status);
            reply.json()
        };
        let text = text(&ask(&body(kind, false))?)?;
        let mut detailed: Value = serde_json::from_str(&body(kind, false))?;
        detailed["logprobs"] = 2.into();
        let reply = ask(&detailed.to_string())?;
        let logprobs = &reply["choices"][0]["logprobs"];
        let offsets = logprobs["text_offset"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        let tops = logprobs["top_logprobs"].as_array().into_iter().flatten().map(|top| {
            let top: Vec<f64> = top.as_object().into_iter().flatten().filter_map(|(_, p)| p.as_f64()).collect();
            // Two tokens with the same text are one name in an object.
            if let [a, b] = top[..] { (a - b).abs() } else { 0.0 }
        });
        Ok(Solo { text, tokens: offsets.map(|offset| offset as usize).zip(tops).collect() })
    }

    /// Nothing runs, waits or holds pages, soon.
    fn is_idle(&self) -> Result<()> {
        let start = Instant::now();
        loop {
            let metrics = client::receive(client::send(self.address, "GET", "/metrics", "")?)?.text()?;
            let zero = |name: &str| metrics.lines().any(|line| line == format!("{name} 0"));
            let names = ["zinc_slots_used", "zinc_requests_queued", "zinc_kv_pages_used", "zinc_requests_failed_total"];
            if names.iter().all(|name| zero(name)) {
                return Ok(());
            }
            ensure!(start.elapsed() < Duration::from_secs(10), "something is left over:\n{metrics}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Memory that the server's process has of its own, without files that it maps.
    fn memory_bytes(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
    }
}

impl Solo {
    /// Whether another reply parts from this one where two tokens were about equally likely.
    fn is_tied_with(&self, other: &str) -> bool {
        let common = self.text.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
        let token = self.tokens.iter().rev().find(|(offset, _)| *offset <= common);
        token.is_some_and(|(_, gap)| *gap < NEAR_TIE)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn text(reply: &Value) -> Result<String> {
    reply["choices"][0]["text"].as_str().map(str::to_owned).with_context(|| format!("{reply} has no text"))
}

/// The text of a stream, and when the first of it came.
fn streamed(reply: client::Reply, start: Instant) -> Result<(String, Option<f64>)> {
    let (mut whole, mut first, mut id) = (String::new(), None, None);
    reply.events(|event| {
        ensure!(event.get("error").is_none(), "{event}");
        ensure!(*id.get_or_insert_with(|| event["id"].clone()) == event["id"], "two replies in one stream");
        first.get_or_insert_with(|| start.elapsed().as_secs_f64());
        whole.push_str(&text(&event)?);
        Ok(true)
    })?;
    Ok((whole, first))
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Report { compared, tied, left, refused, turned_away, seconds, .. } = self;
        writeln!(
            f,
            "{compared} replies equal to those of a quiet server ({tied} up to a near tie), {left} clients left,"
        )?;
        writeln!(f, "{refused} malformed requests refused, {turned_away} times 429; {seconds:.1} s")?;
        let mut times = self.first_token_s.clone();
        times.sort_by(f64::total_cmp);
        let percentile =
            |p: usize| times.get((times.len() * p).div_ceil(100).saturating_sub(1)).map_or(f64::NAN, |s| s * 1e3);
        let (p50, p95, p99) = (percentile(50), percentile(95), percentile(99));
        writeln!(f, "first token of {} streams: p50 {p50:.1} ms, p95 {p95:.1} ms, p99 {p99:.1} ms", times.len())?;
        match self.memory_bytes {
            Some((before, after)) => {
                let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                write!(
                    f,
                    "memory {:.1} MiB after a quarter of the requests, {:.1} MiB in the end",
                    mib(before),
                    mib(after)
                )
            }
            None => f.write_str("memory: this system does not say"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dist, workspace};

    #[test]
    fn no_reply_is_lost_or_mixed_up_under_load() {
        let host = dist::executable(&["build", "--package", "host"], "host").expect("it builds");
        let model = workspace::root().join(workspace::TINY_MODEL);
        let load = Load { clients: 12, requests: 240, slots: 4 };
        let report = run(&host, &model, "cpu", load).expect("a good run");
        assert_eq!(report.compared + report.left + report.refused, load.requests, "{report}");
        assert_eq!(report.tied, 0, "the CPU's results do not depend on neighbours");
        assert!(report.compared > 100 && report.left > 20 && report.refused > 20, "{report}");
    }

    #[test]
    fn only_a_near_tie_excuses_a_difference() {
        let solo = Solo { text: "a cat sat".to_owned(), tokens: vec![(0, 3.0), (1, 0.001), (5, 2.0)] };
        assert!(solo.is_tied_with("a dog sat"));
        assert!(!solo.is_tied_with("a cat ran"));
        assert!(!solo.is_tied_with("no"));
    }

    #[test]
    fn every_deed_is_done() {
        for deed_wanted in [Deed::LeaveStream, Deed::LeaveWhole, Deed::LeavePrompt, Deed::LeaveQueue] {
            assert!((0..240).any(|i| deed(i) == deed_wanted), "{deed_wanted:?}");
        }
    }
}
