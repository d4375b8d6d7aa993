//! Files of the Hugging Face hub: `HF_ENDPOINT` names another one, `HF_TOKEN` opens what is not for everyone.
//!
//! The hub says size and SHA-256 of a large file in the headers of the redirect that leads to its bytes
//! (`X-Linked-Size`, `X-Linked-ETag`). A download is held to them, so what is served elsewhere is what the hub has.
//!
//! Source: `get_hf_file_metadata` of the huggingface_hub documentation.

use std::env;
use std::path::Path;
use std::time::Duration;

use ureq::Agent;
use ureq::http::HeaderMap;

use super::fetch::{self, FetchError, Remote};

const ENDPOINT: &str = "https://huggingface.co";
/// Other addresses that a file may have had.
const MAX_RENAMES: usize = 5;
/// Silence that means a connection is dead.
const PATIENCE: Duration = Duration::from_secs(60);

/// The names of all parts of a file, which is one unless its name says `-00001-of-0000N`.
pub(super) fn parts(file: &str) -> Vec<String> {
    let split = || {
        let (rest, n) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, first) = rest.rsplit_once('-')?;
        let n: u32 = n.parse().ok().filter(|_| n.len() == 5)?;
        (first == "00001" && (2..=999).contains(&n)).then_some((stem, n))
    };
    match split() {
        Some((stem, n)) => (1..=n).map(|i| format!("{stem}-{i:05}-of-{n:05}.gguf")).collect(),
        None => vec![file.to_owned()],
    }
}

/// Fetches the file of `repo` that has the name of `to`.
pub(super) fn fetch(repo: &str, to: &Path) -> Result<(), FetchError> {
    let endpoint = env::var("HF_ENDPOINT").ok().filter(|endpoint| !endpoint.is_empty());
    let endpoint = endpoint.as_deref().unwrap_or(ENDPOINT).trim_end_matches('/');
    let file = to.file_name().unwrap_or_default().to_string_lossy();
    let url = format!("{endpoint}/{repo}/resolve/main/{file}");
    let token = env::var("HF_TOKEN").ok().filter(|token| !token.is_empty());
    let agent = Agent::config_builder()
        // A hub that speaks TLS may not send us to one that does not.
        .https_only(endpoint.starts_with("https://"))
        .http_status_as_error(false)
        .timeout_connect(Some(PATIENCE))
        .timeout_per_read(Some(PATIENCE))
        .user_agent(concat!("zinc/", env!("CARGO_PKG_VERSION")))
        .build()
        .new_agent();
    let remote = describe(&agent, endpoint, url, token.as_deref())?;
    fetch::download(&agent, &remote, to)
}

/// What the hub says about a file. A repository that was renamed leads to another address of the hub.
fn describe(agent: &Agent, endpoint: &str, mut url: String, token: Option<&str>) -> Result<Remote, FetchError> {
    for _ in 0..MAX_RENAMES {
        let mut request = agent.head(&url).config().max_redirects(0).max_redirects_will_error(false).build();
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let reply = match request.call() {
            Ok(reply) => reply,
            Err(source) => return Err(FetchError::Request { url, source }),
        };
        let (status, headers) = (reply.status().as_u16(), reply.headers());
        if !(200..400).contains(&status) {
            return Err(FetchError::Status { url, status });
        }
        let size = text(headers, "x-linked-size").and_then(|size| size.parse().ok());
        let sha256 = text(headers, "x-linked-etag").map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
        let sha256 = sha256.filter(|hash| hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()));
        if let (Some(size), Some(sha256)) = (size, sha256) {
            let sha256 = sha256.to_ascii_lowercase();
            return Ok(Remote { url, token: token.map(str::to_owned), size, sha256 });
        }
        match text(headers, "location") {
            Some(path) if path.starts_with('/') && !path.starts_with("//") => url = format!("{endpoint}{path}"),
            _ => break,
        }
    }
    Err(FetchError::NoHash { url })
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_file_has_parts() {
        assert_eq!(parts("m.gguf"), ["m.gguf"]);
        assert_eq!(parts("m-00001-of-00002.gguf"), ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
        for whole in ["m-00002-of-00002.gguf", "m-00001-of-00001.gguf", "m-00001-of-2.gguf", "of-00001-of-99999.gguf"] {
            assert_eq!(parts(whole), [whole]);
        }
    }
}
