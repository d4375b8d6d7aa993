//! Replies as server-sent events: one `data:` line of JSON per chunk, `data: [DONE]` at the end.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;

use super::pieces::Pieces;
use super::reply::Writer;

/// A comment after this much silence keeps proxies from closing the connection of a request that waits.
const SILENCE: Duration = Duration::from_secs(15);

struct State {
    writer: Writer,
    pieces: Pieces,
    usage: bool,
    phase: Phase,
}

enum Phase {
    Pieces,
    Usage,
    Done,
    End,
}

/// A stream of `pieces`. When the client goes away hyper drops the body, and with it the events: see `worker`.
pub(super) fn response(writer: Writer, pieces: Pieces, usage: bool) -> Response {
    let state = State { writer, pieces, usage, phase: Phase::Pieces };
    let events = stream::unfold(state, |mut state| async {
        let event = state.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(event)), state))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // nginx would collect the chunks.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(events)).into_response()
}

impl State {
    async fn next(&mut self) -> Option<String> {
        loop {
            match self.phase {
                Phase::Pieces => {
                    let Ok(next) = tokio::time::timeout(SILENCE, self.pieces.next()).await else {
                        return Some(": waiting\n\n".to_owned());
                    };
                    match next {
                        Ok(Some(piece)) => {
                            if let Some(chunk) = self.writer.chunk(&piece) {
                                return Some(data(&chunk));
                            }
                        }
                        Ok(None) => self.phase = Phase::Usage,
                        Err(error) => {
                            // The status is long sent. Without [DONE] nobody takes this for a complete reply.
                            self.phase = Phase::End;
                            return Some(data(&error.to_json()));
                        }
                    }
                }
                Phase::Usage => {
                    self.phase = Phase::Done;
                    if self.usage {
                        return Some(data(&self.writer.usage_chunk(self.pieces.totals())));
                    }
                }
                Phase::Done => {
                    self.phase = Phase::End;
                    return Some("data: [DONE]\n\n".to_owned());
                }
                Phase::End => return None,
            }
        }
    }
}

/// JSON has no raw line breaks, so one line holds it.
fn data(json: &Value) -> String {
    format!("data: {json}\n\n")
}
