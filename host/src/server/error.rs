//! What goes wrong, in the form that OpenAI's clients read:
//! `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::chat::TemplateError;
use crate::engine::SubmitError;

/// Why the server cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address is taken, not ours, or no address.
    #[error("cannot listen on {address}")]
    Listen {
        /// Host and port.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Threads or signals are not to be had.
    #[error("the server cannot start")]
    Start(#[source] std::io::Error),
    /// A model without a vocabulary cannot speak.
    #[error("the model file has no vocabulary; a server needs one")]
    NoVocabulary,
    /// The engine's thread ended by a bug.
    #[error("the engine stopped unexpectedly; see the log")]
    EngineStopped,
}

/// A refused or failed request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code: None, param: None, message: message.into() }
    }

    /// 400: this field cannot be what it is.
    pub(super) fn field(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        let message = format!("{param}: {problem}");
        Self { param: Some(param), ..Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message) }
    }

    /// 400: the field is known, and what it asks for is not there. Better than an answer that ignores it.
    pub(super) fn unsupported(param: &str, what: &str) -> Self {
        Self { code: Some("unsupported"), ..Self::field(param, format!("{what} is not supported by this server")) }
    }

    /// Another status of the client's making.
    pub(super) fn client(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// 401.
    pub(super) fn unauthorized() -> Self {
        let message = "a valid API key is needed: send it as `Authorization: Bearer KEY`";
        let error = Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message);
        Self { code: Some("invalid_api_key"), ..error }
    }

    /// 500: the model or its template failed.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 503: no engine, or none any more.
    pub(super) fn unavailable() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "the server is shutting down")
    }

    /// The body of the reply, or the `data:` of a stream that failed midway.
    pub(super) fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }

    /// A refusal by the engine; `param` names the field that the prompt came from.
    pub(super) fn submit(error: &SubmitError, param: &str) -> Self {
        match error {
            SubmitError::ContextLengthExceeded { prompt, n_ctx } => {
                let message = format!("the context holds {n_ctx} tokens, the prompt alone has {prompt}");
                Self { code: Some("context_length_exceeded"), message, ..Self::field(param, "") }
            }
            SubmitError::QueueFull { .. } => {
                let busy = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", error.to_string());
                Self { code: Some("queue_full"), ..busy }
            }
            SubmitError::Sampling(invalid) => Self::field(invalid.field, format!("{} {}", invalid.value, invalid.why)),
            SubmitError::EmptyPrompt | SubmitError::TokenOutOfRange { .. } => Self::field(param, error),
        }
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        match &error {
            TemplateError::Message { place, problem } => Self::field(place, problem),
            _ if error.is_client_error() => Self::field("messages", &error),
            _ => Self::internal(error.to_string()),
        }
    }
}

/// Seconds after which a client that was turned away may ask again: about the length of a short reply.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        let headers = response.headers_mut();
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, RETRY_AFTER);
            }
            StatusCode::UNAUTHORIZED => {
                // Basic lets a browser ask for the key; its user name is not looked at.
                headers
                    .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"API key as password\""));
            }
            _ => {}
        }
        response
    }
}
