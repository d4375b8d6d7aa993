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
    let remote = describe(&agent, &url, token.as_deref())?;
    fetch::download(&agent, &remote, to)
}

/// What the hub says about a file.
fn describe(agent: &Agent, url: &str, token: Option<&str>) -> Result<Remote, FetchError> {
    let mut request = agent.head(url).config().max_redirects(0).max_redirects_will_error(false).build();
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let reply = request.call().map_err(|source| FetchError::Request { url: url.to_owned(), source })?;
    let status = reply.status().as_u16();
    if !(200..400).contains(&status) {
        return Err(FetchError::Status { url: url.to_owned(), status });
    }
    let headers = reply.headers();
    let size = text(headers, "x-linked-size").or_else(|| text(headers, "content-length").filter(|_| status == 200));
    let size = size.and_then(|size| size.parse().ok());
    let sha256 = text(headers, "x-linked-etag").map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
    let sha256 = sha256.filter(|hash| hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()));
    match (size, sha256) {
        (Some(size), Some(sha256)) => Ok(Remote {
            url: url.to_owned(),
            token: token.map(str::to_owned),
            size,
            sha256: sha256.to_ascii_lowercase(),
        }),
        _ => Err(FetchError::NoHash { url: url.to_owned() }),
    }
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
