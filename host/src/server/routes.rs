//! Which address does what, and the small ones.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use super::app::App;
use super::auth::require_key;
use super::error::ApiError;
use super::guard::{Guard, check_host};
use super::{embeddings, generate, tokens};

/// The chat page: one file that loads nothing from anywhere.
const PAGE: &str = include_str!("page.html");
/// Nothing but the page itself may run or be reached, whatever a model writes into it.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// All routes.
pub(super) fn router(app: Arc<App>, guard: Guard) -> Router {
    let cors = guard.cors.clone();
    let router = Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completions))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), require_key))
        .layer(from_fn_with_state(guard, check_host))
        .layer(from_fn_with_state(app.clone(), count))
        .with_state(app);
    // Outermost: a browser asks for permission without a key.
    match cors {
        Some(cors) => router.layer(cors),
        None => router,
    }
}

async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    app.metrics.count_reply(response.status().as_u16());
    response
}

async fn page() -> impl IntoResponse {
    let policy = [
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (HeaderName::from_static("referrer-policy"), "no-referrer"),
    ];
    (policy, Html(PAGE))
}

async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if app.worker.is_running() { Ok(Json(json!({"status": "ok"}))) } else { Err(ApiError::unavailable()) }
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render())
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model_json(&app)]}))
}

async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    if id == app.model.alias {
        return Ok(Json(model_json(&app)));
    }
    Err(ApiError::client(StatusCode::NOT_FOUND, "there is no such model; /v1/models lists what there is"))
}

fn model_json(app: &App) -> Value {
    json!({
        "id": app.model.alias,
        "object": "model",
        "created": app.created,
        "owned_by": "zinc",
        "max_model_len": app.model.n_ctx,
    })
}

async fn not_found() -> ApiError {
    ApiError::client(StatusCode::NOT_FOUND, "there is no such route")
}

async fn wrong_method() -> ApiError {
    ApiError::client(StatusCode::METHOD_NOT_ALLOWED, "this route does not take this method")
}
