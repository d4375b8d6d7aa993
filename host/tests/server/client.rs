//! The real server as a child process, and an HTTP client of a few lines that trusts nothing: it reads bytes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const MODEL: &str = "../models/zinc-tiny-qwen35moe.gguf";
/// Longer than any reply of these tests takes on a busy machine: a hang is a failure, not a wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running server; it dies with this.
pub(crate) struct Server {
    child: Child,
    address: SocketAddr,
    key: Option<String>,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    /// Lower-case names.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Server {
    /// Starts the server on the CPU with the small model.
    pub(crate) fn start(args: &[&str]) -> Server {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL);
        let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
        command.args(["serve", "--device", "cpu", "--port", "0", "-m"]).arg(model).args(args);
        command.env_remove("RUST_LOG").env_remove("ZINC_API_KEY").stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let line = lines.next().expect("a line").expect("UTF-8");
        let address = line.strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line}"));
        let address = address.parse().expect("an address");
        // Nobody may block on a full pipe.
        std::thread::spawn(move || lines.for_each(|line| eprintln!("server: {}", line.unwrap_or_default())));
        Server { child, address, key: None }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sends this key from now on.
    pub(crate) fn with_key(mut self, key: &str) -> Server {
        self.key = Some(key.to_owned());
        self
    }

    /// A connection, for what is no ordinary request.
    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream
    }

    /// Sends a request and leaves the reply to the caller.
    pub(crate) fn open(&self, method: &str, path: &str, kind: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let key = self.key.as_ref().map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
        let n = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{key}content-type: {kind}\r\n\
             content-length: {n}\r\n\r\n"
        );
        // A server that refuses early may close before it has read everything.
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).ok();
        stream
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        read_reply(self.open("GET", path, "application/json", ""))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_text(path, &body.to_string())
    }

    pub(crate) fn post_text(&self, path: &str, body: &str) -> Reply {
        read_reply(self.open("POST", path, "application/json", body))
    }

    /// The JSON of a request that has to succeed.
    pub(crate) fn ok(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.body);
        reply.json()
    }

    /// The `error` of a request that has to fail with this status, in OpenAI's form.
    pub(crate) fn refused(&self, path: &str, body: &Value, status: u16) -> Value {
        self.post(path, body).error(status)
    }

    /// The chunks of a stream, which has to end well.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let reply = self.post(path, &body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.body);
        assert!(reply.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")));
        reply.chunks()
    }

    /// A value of `/metrics`.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} is not in {text}")).parse().expect("a number")
    }

    /// Waits until a value of `/metrics` is as wanted.
    pub(crate) fn wait_for(&self, name: &str, wanted: impl Fn(u64) -> bool) {
        let start = Instant::now();
        while !wanted(self.metric(name)) {
            assert!(start.elapsed() < Duration::from_secs(10), "{name} stays {}", self.metric(name));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks the server to end, as a service manager does.
    pub(crate) fn terminate(&self) {
        let status = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits for the end; whether it was a success.
    pub(crate) fn wait(&mut self) -> bool {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.success();
            }
            assert!(start.elapsed() < PATIENCE, "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The error that this has to be.
    pub(crate) fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        assert_eq!(self.header("content-type"), Some("application/json"));
        let error = self.json()["error"].take();
        assert!(error["message"].is_string() && error["type"].is_string(), "{}", self.body);
        assert!(error.get("param").is_some() && error.get("code").is_some(), "{}", self.body);
        error
    }

    /// The `data:` lines of a stream that ends with `[DONE]`.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut data: Vec<&str> = self.body.split_terminator("\n\n").filter(|event| !event.starts_with(':')).collect();
        assert_eq!(data.pop(), Some("data: [DONE]"), "{}", self.body);
        let parse = |event: &str| {
            let json = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?} is no data"));
            serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {json}"))
        };
        data.into_iter().map(parse).collect()
    }
}

/// Reads until the server closes.
pub(crate) fn read_reply(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    // A connection that is reset after the reply has still replied.
    if let Err(e) = stream.read_to_end(&mut bytes) {
        assert!(e.kind() == std::io::ErrorKind::ConnectionReset && !bytes.is_empty(), "{e}");
    }
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a head");
    let head = std::str::from_utf8(&bytes[..end]).expect("a head is ASCII");
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).expect("a status");
    let header = |line: &str| {
        let (name, value) = line.split_once(':').expect("a header");
        (name.to_ascii_lowercase(), value.trim().to_owned())
    };
    let headers: Vec<_> = lines.map(header).collect();
    let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let body = &bytes[end + 4..];
    let body = if chunked { dechunk(body) } else { body.to_vec() };
    Reply { status, headers, body: String::from_utf8(body).expect("every reply is UTF-8") }
}

fn dechunk(mut body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    loop {
        let line = body.windows(2).position(|w| w == b"\r\n").expect("the size of a chunk");
        let size = std::str::from_utf8(&body[..line]).expect("ASCII");
        let size = usize::from_str_radix(size, 16).expect("hexadecimal");
        body = &body[line + 2..];
        if size == 0 {
            return out;
        }
        out.extend_from_slice(&body[..size]);
        body = &body[size + 2..];
    }
}
