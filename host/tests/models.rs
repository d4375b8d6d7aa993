//! `host model` against a hub of a few lines on this machine.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::{fs, thread};

use sha2::{Digest, Sha256};

const NAME: &str = "hf:owner/repo/tiny.gguf";

/// A hub with one file, which does as it is told.
#[derive(Clone, Default)]
struct Hub {
    bytes: Arc<Vec<u8>>,
    state: Arc<Mutex<State>>,
}

#[derive(Clone, Default)]
struct State {
    /// Bytes of a body after which the connection is cut.
    cut_after: Option<usize>,
    /// The size and the hash it states instead of the right ones.
    size: Option<u64>,
    sha256: Option<String>,
    /// It does not know ranges.
    no_ranges: bool,
    /// It wants to see this token.
    token: Option<&'static str>,
    /// The `Range` of every request for bytes.
    ranges: Vec<Option<String>>,
}

impl Hub {
    /// Starts it; gives its address.
    fn start(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let hub = self.clone();
        // It ends with the test's process.
        thread::spawn(move || listener.incoming().flatten().for_each(|stream| hub.serve(stream)));
        format!("http://{address}")
    }

    fn serve(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().expect("a handle")).lines().map_while(Result::ok);
        let request = lines.next().unwrap_or_default();
        let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
        let header = |name: &str| {
            let found =
                headers.iter().find_map(|line| line.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case(name)));
            found.map(|(_, value)| value.to_owned())
        };
        let mut state = self.state.lock().expect("no thread fails with it");
        if state.token.is_some_and(|token| header("authorization") != Some(format!("Bearer {token}")))
            && !request.contains("/bytes")
        {
            write!(stream, "HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").ok();
        } else if request.contains("/owner/old-name/") {
            let moved = "HTTP/1.1 307 Temporary Redirect\r\nlocation: /owner/repo/resolve/main/tiny.gguf\r\n";
            write!(stream, "{moved}content-length: 0\r\nconnection: close\r\n\r\n").ok();
        } else if request.contains("/owner/repo/resolve/main/tiny.gguf ") {
            let size = state.size.unwrap_or(self.bytes.len() as u64);
            let sha256 = state.sha256.clone().unwrap_or_else(|| sha256(&self.bytes));
            let etag = if sha256.is_empty() { String::new() } else { format!("x-linked-etag: \"{sha256}\"\r\n") };
            write!(
                stream,
                "HTTP/1.1 302 Found\r\nlocation: /bytes\r\nx-linked-size: {size}\r\n{etag}content-length: 0\r\nconnection: close\r\n\r\n"
            )
            .ok();
        } else if request.contains("/bytes ") {
            assert_eq!(header("authorization"), None, "the token goes to the hub alone");
            let range = header("range");
            if request.starts_with("GET ") {
                state.ranges.push(range.clone());
            }
            let start = range
                .filter(|_| !state.no_ranges)
                .and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
            let (status, start) = start.map_or(("200 OK", 0), |start| ("206 Partial Content", start));
            let (body, total) = (&self.bytes[start..], self.bytes.len());
            let range = format!("content-range: bytes {start}-{}/{total}\r\n", total - 1);
            let range = if start > 0 { range.as_str() } else { "" };
            write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n{range}connection: close\r\n\r\n", body.len())
                .ok();
            // A client that has enough may be gone.
            stream.write_all(&body[..state.cut_after.unwrap_or(body.len()).min(body.len())]).ok();
        } else {
            write!(stream, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").ok();
        }
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().expect("no thread fails with it"));
    }

    fn ranges(&self) -> Vec<Option<String>> {
        self.state.lock().expect("no thread fails with it").ranges.clone()
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A hub with the small model, and a folder to fetch it to.
struct Setting {
    hub: Hub,
    endpoint: String,
    folder: tempfile::TempDir,
}

impl Setting {
    fn new() -> Setting {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/zinc-tiny-qwen35moe.gguf");
        let hub = Hub { bytes: Arc::new(fs::read(model).expect("the model")), ..Hub::default() };
        Setting { endpoint: hub.start(), hub, folder: tempfile::tempdir().expect("a folder") }
    }

    fn host(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
        command.args(args).env("HF_ENDPOINT", &self.endpoint).env("ZINC_MODELS", self.folder.path());
        for other in ["HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
            command.env_remove(other);
        }
        command.output().expect("the program runs")
    }

    fn ok(&self, args: &[&str]) -> String {
        let output = self.host(args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// What a command that has to fail says.
    fn fails(&self, args: &[&str]) -> String {
        let output = self.host(args);
        assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        String::from_utf8(output.stderr).expect("UTF-8")
    }

    fn files(&self) -> Vec<PathBuf> {
        let folder = self.folder.path().join("owner--repo");
        fs::read_dir(folder).map_or(Vec::new(), |entries| entries.flatten().map(|entry| entry.path()).collect())
    }
}

#[test]
fn a_model_is_pulled_used_and_removed() {
    let setting = Setting::new();
    let missing = setting.fails(&["model", "path", NAME]);
    assert!(missing.contains("host model pull"), "{missing}");
    assert!(setting.fails(&["tokenize", "-m", NAME, "Hi"]).contains("host model pull"));
    let path = setting.ok(&["model", "pull", NAME]);
    assert_eq!(fs::read(path.trim()).expect("the file"), *setting.hub.bytes);
    assert_eq!(setting.files().len(), 1, "no part is left");
    assert_eq!(setting.ok(&["model", "path", NAME]), path);
    assert!(setting.ok(&["tokenize", "-m", NAME, "Hi"]).starts_with('['));
    setting.ok(&["model", "pull", NAME]);
    assert_eq!(setting.hub.ranges(), [None], "what is here is not fetched again");
    assert!(setting.ok(&["model", "rm", NAME]).contains("removed"));
    assert!(setting.files().is_empty());
    assert!(setting.fails(&["model", "rm", NAME]).contains("not here"));
    let renamed = setting.ok(&["model", "pull", "hf:owner/old-name/tiny.gguf"]);
    assert_eq!(fs::read(renamed.trim()).expect("the file"), *setting.hub.bytes);
    let list = setting.ok(&["model", "list"]);
    assert!(list.contains("smollm2-135m") && list.contains("gpt-oss-20b"), "{list}");
}

#[test]
fn a_download_that_was_cut_goes_on() {
    let setting = Setting::new();
    setting.hub.set(|state| state.cut_after = Some(1_000_000));
    let cut = setting.fails(&["model", "pull", NAME]);
    assert!(cut.contains("1000000 of") && cut.contains("repeat"), "{cut}");
    assert!(setting.fails(&["model", "path", NAME]).contains("not here"), "half a model is none");
    setting.hub.set(|state| state.cut_after = None);
    let path = setting.ok(&["model", "pull", NAME]);
    assert_eq!(setting.hub.ranges(), [None, Some("bytes=1000000-".to_owned())]);
    assert_eq!(fs::read(path.trim()).expect("the file"), *setting.hub.bytes);

    // A server without ranges sends everything again.
    setting.ok(&["model", "rm", NAME]);
    setting.hub.set(|state| (state.cut_after, state.no_ranges) = (Some(1000), true));
    setting.fails(&["model", "pull", NAME]);
    setting.hub.set(|state| state.cut_after = None);
    let path = setting.ok(&["model", "pull", NAME]);
    assert_eq!(fs::read(path.trim()).expect("the file"), *setting.hub.bytes);
}

#[test]
fn what_is_not_as_promised_is_refused() {
    let setting = Setting::new();
    let size = setting.hub.bytes.len() as u64;
    let other = sha256(b"another file");
    setting.hub.set(|state| state.sha256 = Some(other.clone()));
    let hash = setting.fails(&["model", "pull", NAME]);
    assert!(hash.contains(&other) && hash.contains(&sha256(&setting.hub.bytes)), "{hash}");
    assert!(setting.files().is_empty(), "it is not kept");

    setting.hub.set(|state| (state.sha256, state.size) = (None, Some(size - 1)));
    assert!(setting.fails(&["model", "pull", NAME]).contains("more than"));
    assert!(setting.files().is_empty());
    setting.hub.set(|state| state.size = Some(size + 1));
    assert!(setting.fails(&["model", "pull", NAME]).contains("stopped after"));
    setting.ok(&["model", "rm", NAME]);

    setting.hub.set(|state| state.size = Some(1 << 60));
    let full = setting.fails(&["model", "pull", NAME]);
    assert!(full.contains("GiB are free"), "{full}");
    let n = setting.hub.ranges().len();
    setting.hub.set(|state| (state.size, state.sha256) = (None, Some(String::new())));
    assert!(setting.fails(&["model", "pull", NAME]).contains("no size and SHA-256"));
    setting.hub.set(|state| state.sha256 = Some("not a hash".to_owned()));
    assert!(setting.fails(&["model", "pull", NAME]).contains("no size and SHA-256"));
    setting.hub.set(|state| (state.sha256, state.token) = (None, Some("secret")));
    assert!(setting.fails(&["model", "pull", NAME]).contains("HF_TOKEN"));
    assert_eq!(setting.hub.ranges().len(), n, "no byte was asked for");
    assert!(setting.fails(&["model", "pull", "hf:owner/repo/other.gguf"]).contains("401"));
    setting.hub.set(|state| state.token = None);
    assert!(setting.fails(&["model", "pull", "hf:owner/repo/other.gguf"]).contains("404"));
    for name in ["no-such-model", "hf:owner/repo", "hf:../../x/y.gguf"] {
        assert!(setting.fails(&["model", "pull", name]).contains("host model list"), "{name}");
    }
}

#[test]
fn two_processes_do_not_fetch_the_same_file() {
    let setting = Setting::new();
    setting.hub.set(|state| state.cut_after = Some(10));
    setting.fails(&["model", "pull", NAME]);
    let part = fs::OpenOptions::new().append(true).open(&setting.files()[0]).expect("the part");
    part.lock().expect("nobody has it");
    assert!(setting.fails(&["model", "pull", NAME]).contains("another process"));
    drop(part);
    setting.hub.set(|state| state.cut_after = None);
    setting.ok(&["model", "pull", NAME]);
}
