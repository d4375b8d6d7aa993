//! `POST /v1/embeddings`: the mean of the final hidden states of a text's tokens, scaled to length 1.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use base64::prelude::{BASE64_STANDARD, Engine};
use serde_json::{Value, json};

use super::app::{App, off_thread};
use super::error::ApiError;
use super::fields::Fields;
use super::worker::{Events, Work};
use super::{body, prompts};
use crate::engine::{Event, FinishReason};

pub(super) async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = body::read(request, app.patience).await?;
    let (inputs, as_base64) = {
        let app = app.clone();
        off_thread(move || {
            let map = body::parse(&body)?;
            let fields = Fields::new(&map);
            fields.text("model")?;
            if fields.get("dimensions").is_some() {
                return Err(ApiError::unsupported("dimensions", "shortening embeddings"));
            }
            let as_base64 = match fields.text("encoding_format")? {
                None | Some("float") => false,
                Some("base64") => true,
                Some(_) => return Err(fields.wrong("encoding_format", "expected \"float\" or \"base64\"")),
            };
            Ok((prompts::plain(&app.model, &fields, "input")?, as_base64))
        })
        .await?
    };
    let n = inputs.len();
    let events = app.submit(inputs.into_iter().map(Work::Embedding).collect(), "input").await?;
    let (vectors, prompt_tokens) = collect(events, n).await?;
    let data = vectors.iter().enumerate().map(|(index, vector)| {
        let embedding = if as_base64 {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Value::from(BASE64_STANDARD.encode(&bytes))
        } else {
            Value::from(vector.as_slice())
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    });
    Ok(Json(json!({
        "object": "list",
        "data": data.collect::<Vec<_>>(),
        "model": app.model.alias,
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    })))
}

async fn collect(mut events: Events, n: usize) -> Result<(Vec<Vec<f32>>, u64), ApiError> {
    let mut vectors = vec![Vec::new(); n];
    let (mut open, mut prompt_tokens) = (n, 0);
    while open > 0 {
        let (index, event) = events.recv().await.ok_or_else(ApiError::unavailable)?;
        match event {
            Event::Embedding { embedding, .. } => {
                if let Some(vector) = vectors.get_mut(index) {
                    *vector = normalised(embedding);
                }
            }
            Event::Finished { reason, usage, .. } => {
                match reason {
                    FinishReason::Stop(_) | FinishReason::Length => {}
                    FinishReason::Cancelled => return Err(ApiError::unavailable()),
                    FinishReason::Error(why) => return Err(ApiError::internal(why)),
                }
                open -= 1;
                prompt_tokens += u64::from(usage.prompt_tokens);
            }
            Event::Started { .. } | Event::Text { .. } => {}
        }
    }
    Ok((vectors, prompt_tokens))
}

/// `x / |x|`; a zero vector stays.
fn normalised(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    vector
}
