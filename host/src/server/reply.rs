//! From pieces to the JSON of chats and completions, whole and in chunks.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::app::{App, now_s};
use super::error::ApiError;
use super::logprobs;
use super::markup::{CallPiece, Said};
use super::pieces::{Piece, Pieces, Totals};
use super::stream;
use crate::engine::SampledToken;

/// Which endpoint replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Completion,
}

/// How a reply is written.
pub(super) struct Writer {
    app: Arc<App>,
    kind: Kind,
    id: String,
    created: u64,
    /// Whether log probabilities were asked for.
    logprobs: bool,
    /// Characters written so far, per choice.
    offsets: Vec<usize>,
}

/// A choice of a whole reply.
#[derive(Default)]
struct Gathered {
    said: Said,
    tokens: Vec<SampledToken>,
    finish: &'static str,
}

impl Writer {
    pub(super) fn new(app: Arc<App>, kind: Kind, n_choices: usize, logprobs: bool) -> Self {
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let id = app.new_id(prefix);
        Self { app, kind, id, created: now_s(), logprobs, offsets: vec![0; n_choices] }
    }

    /// The reply to the client, in one piece or as a stream.
    pub(super) async fn respond(self, pieces: Pieces, streamed: bool, usage: bool) -> Result<Response, ApiError> {
        if streamed {
            return Ok(stream::response(self, pieces, usage));
        }
        Ok(Json(self.whole(pieces).await?).into_response())
    }

    /// What surrounds choices.
    fn envelope(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".to_owned(), self.id.as_str().into());
        map.insert("object".to_owned(), object.into());
        map.insert("created".to_owned(), self.created.into());
        map.insert("model".to_owned(), self.app.model.alias.as_str().into());
        map.insert("choices".to_owned(), choices.into());
        map
    }

    fn chunk_object(&self) -> &'static str {
        if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    /// One chunk of a stream; `None` where a piece has nothing to show yet.
    pub(super) fn chunk(&mut self, piece: &Piece) -> Option<Value> {
        let Piece { index, first, said, tokens, finish } = piece;
        let logprobs = self.logprobs && !tokens.is_empty();
        if said.is_empty() && finish.is_none() && !logprobs {
            // The role goes out at once: it tells the client that its reply has begun.
            if !(*first && self.kind == Kind::Chat) {
                return None;
            }
        }
        let mut choice = Map::new();
        choice.insert("index".to_owned(), (*index).into());
        match self.kind {
            Kind::Chat => {
                let mut delta = Map::new();
                if *first {
                    delta.insert("role".to_owned(), "assistant".into());
                }
                if !said.reasoning.is_empty() {
                    delta.insert("reasoning_content".to_owned(), said.reasoning.as_str().into());
                }
                if !said.content.is_empty() || *first {
                    delta.insert("content".to_owned(), said.content.as_str().into());
                }
                if !said.calls.is_empty() {
                    let calls = said.calls.iter().map(|piece| self.call_delta(*index, piece));
                    delta.insert("tool_calls".to_owned(), calls.collect());
                }
                choice.insert("delta".to_owned(), delta.into());
            }
            Kind::Completion => {
                choice.insert("text".to_owned(), said.content.as_str().into());
            }
        }
        choice.insert("logprobs".to_owned(), self.logprobs_json(*index, tokens, logprobs));
        choice.insert("finish_reason".to_owned(), (*finish).into());
        let choices = vec![choice.into()];
        Some(self.envelope(self.chunk_object(), choices).into())
    }

    /// The chunk of a stream that counts its tokens.
    pub(super) fn usage_chunk(&self, totals: Totals) -> Value {
        let mut map = self.envelope(self.chunk_object(), Vec::new());
        map.insert("usage".to_owned(), usage(totals));
        map.into()
    }

    async fn whole(mut self, mut pieces: Pieces) -> Result<Value, ApiError> {
        let mut gathered: Vec<Gathered> = self.offsets.iter().map(|_| Gathered::default()).collect();
        while let Some(piece) = pieces.next().await? {
            let Some(choice) = gathered.get_mut(piece.index) else { continue };
            choice.said.extend(piece.said);
            choice.tokens.extend(piece.tokens);
            choice.finish = piece.finish.unwrap_or(choice.finish);
        }
        let choices = gathered.into_iter().enumerate().map(|(index, choice)| self.choice(index, choice)).collect();
        let object = if self.kind == Kind::Chat { "chat.completion" } else { "text_completion" };
        let mut map = self.envelope(object, choices);
        map.insert("usage".to_owned(), usage(pieces.totals()));
        Ok(map.into())
    }

    fn choice(&mut self, index: usize, choice: Gathered) -> Value {
        let logprobs = self.logprobs_json(index, &choice.tokens, self.logprobs);
        let mut map = Map::new();
        map.insert("index".to_owned(), index.into());
        match self.kind {
            Kind::Chat => {
                let Said { reasoning, content, calls } = choice.said;
                let mut message = json!({"role": "assistant", "content": content});
                if !reasoning.is_empty() {
                    message["reasoning_content"] = reasoning.into();
                }
                if !calls.is_empty() {
                    message["tool_calls"] = calls.iter().map(|call| self.call(index, call)).collect();
                    if message["content"] == "" {
                        message["content"] = Value::Null;
                    }
                }
                map.insert("message".to_owned(), message);
            }
            Kind::Completion => {
                map.insert("text".to_owned(), choice.said.content.into());
            }
        }
        map.insert("logprobs".to_owned(), logprobs);
        map.insert("finish_reason".to_owned(), choice.finish.into());
        map.into()
    }

    /// A call of a choice; its id is like no other of this server.
    fn call(&self, choice: usize, call: &CallPiece) -> Value {
        json!({
            "id": format!("call_{}_{choice}_{}", self.id.trim_start_matches("chatcmpl-"), call.index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        })
    }

    /// A call's part of a chunk: the id and the name come with its first.
    fn call_delta(&self, choice: usize, piece: &CallPiece) -> Value {
        let mut delta = match piece.name {
            Some(_) => self.call(choice, piece),
            None => json!({"function": {"arguments": piece.arguments}}),
        };
        delta["index"] = piece.index.into();
        delta
    }

    fn logprobs_json(&mut self, index: usize, tokens: &[SampledToken], wanted: bool) -> Value {
        let tokenizer = &self.app.model.tokenizer;
        match self.kind {
            _ if !wanted => Value::Null,
            Kind::Chat => json!({"content": logprobs::chat(tokenizer, tokens)}),
            Kind::Completion => {
                let offset = self.offsets[index];
                let text = tokens.iter().map(|token| String::from_utf8_lossy(tokenizer.token_bytes_special(token.id)));
                self.offsets[index] += text.map(|text| text.chars().count()).sum::<usize>();
                logprobs::completion(tokenizer, tokens, offset)
            }
        }
    }
}

/// The `usage` of a reply.
fn usage(totals: Totals) -> Value {
    let Totals { prompt_tokens, completion_tokens, cached_tokens } = totals;
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    })
}
