//! The body of a request: JSON, no larger than a limit, and sent within one.

use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use serde_json::{Map, Value};

use super::error::ApiError;

/// Holds any context there is, and a long list of prompts.
const MAX_BYTES: usize = 8 << 20;

/// Reads the body of a request. Parsing is [`parse`]'s, which may take a while. A client that needs longer than
/// `patience` is stuck, or wants the connection for itself.
pub(super) async fn read(request: Request, patience: Duration) -> Result<Bytes, ApiError> {
    // A page of another origin cannot send this type without asking first, and is told no.
    if !is_json(request.headers()) {
        let message = "the content type has to be application/json";
        return Err(ApiError::client(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    match tokio::time::timeout(patience, collect(request.into_body())).await {
        Ok(body) => body,
        Err(_) => Err(ApiError::client(StatusCode::REQUEST_TIMEOUT, "the body of the request did not arrive in time")),
    }
}

async fn collect(body: Body) -> Result<Bytes, ApiError> {
    to_bytes(body, MAX_BYTES).await.map_err(|error| {
        tracing::debug!("a body could not be read: {error}");
        let message = format!("the body could not be read; it may have up to {MAX_BYTES} bytes");
        ApiError::client(StatusCode::PAYLOAD_TOO_LARGE, message)
    })
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.and_then(|kind| kind.split(';').next())
        .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// The object that a body holds.
pub(super) fn parse(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let bad = |message: String| ApiError::client(StatusCode::BAD_REQUEST, message);
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(bad("the body has to be a JSON object".to_owned())),
        Err(error) => Err(bad(format!("the body is not valid JSON: {error}"))),
    }
}
