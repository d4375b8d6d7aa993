//! `POST /tokenize` and `POST /detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Value, json};

use super::app::{App, off_thread};
use super::body;
use super::error::ApiError;
use super::fields::Fields;
use super::params::token_ids;
use crate::tokenizer::Encode;

/// `{"content": TEXT, "add_special": BOOL, "parse_special": BOOL}` → `{"tokens": [ID…]}`.
pub(super) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = body::read(request, app.patience).await?;
    off_thread(move || {
        let map = body::parse(&body)?;
        let fields = Fields::new(&map);
        let text = fields.text("content")?.ok_or_else(|| fields.wrong("content", "expected a string"))?;
        let options = Encode { bos: fields.bool("add_special")?, special: fields.bool("parse_special")? };
        Ok(Json(json!({"tokens": app.model.tokenizer.encode(text, options)})))
    })
    .await
}

/// `{"tokens": [ID…]}` → `{"content": TEXT}`; control tokens are shown.
pub(super) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = body::read(request, app.patience).await?;
    off_thread(move || {
        let map = body::parse(&body)?;
        let fields = Fields::new(&map);
        let list = fields.list("tokens")?.ok_or_else(|| fields.wrong("tokens", "expected a list of token ids"))?;
        let ids = token_ids("tokens", list, app.model.n_vocab)?;
        Ok(Json(json!({"content": app.model.tokenizer.decode(&ids, true)})))
    })
    .await
}
