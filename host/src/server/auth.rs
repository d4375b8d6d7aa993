//! The API key: needed on every route but `/health`, where the server has one.
//!
//! As `Authorization: Bearer KEY`, or as the password of `Basic`, by which a browser can ask for it.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::prelude::{BASE64_STANDARD, Engine};

use super::app::App;
use super::error::ApiError;

pub(super) async fn require_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match &app.api_key {
        Some(key) if request.uri().path() != "/health" && !is_authorized(request.headers(), key) => {
            ApiError::unauthorized().into_response()
        }
        _ => next.run(request).await,
    }
}

fn is_authorized(headers: &HeaderMap, key: &str) -> bool {
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some((scheme, credentials)) = given.and_then(|given| given.split_once(' ')) else { return false };
    let credentials = credentials.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return same(credentials.as_bytes(), key.as_bytes());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return false;
    }
    let Some(pair) = BASE64_STANDARD.decode(credentials).ok() else { return false };
    let colon = pair.iter().position(|byte| *byte == b':');
    colon.is_some_and(|colon| same(&pair[colon + 1..], key.as_bytes()))
}

/// Whether two byte strings are equal, in a time that depends on `given`'s length alone: how long it takes says nothing
/// about the key.
fn same(given: &[u8], key: &[u8]) -> bool {
    let mut difference = given.len() ^ key.len();
    for (i, byte) in given.iter().enumerate() {
        // black_box keeps the loop from being left early.
        let expected = key.get(i % key.len().max(1)).copied().unwrap_or(0);
        difference |= usize::from(std::hint::black_box(byte ^ expected));
    }
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_the_key_opens() {
        for (given, want) in [
            ("Bearer secret", true),
            ("bearer secret", true),
            ("Bearer secre", false),
            ("Bearer secretsecret", false),
            ("Bearer ", false),
            ("Bearer", false),
            ("secret", false),
            ("Basic dTpzZWNyZXQ=", true),
            ("Basic dTpzZWNyZXg=", false),
            ("Basic c2VjcmV0", false),
            ("Basic ?", false),
        ] {
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(given))]);
            assert_eq!(is_authorized(&headers, "secret"), want, "{given}");
        }
        assert!(!is_authorized(&HeaderMap::new(), "secret"));
    }
}
