//! The events of a request's choices, in the terms of the API. Streams and whole replies are both made of these, which
//! is why they are equal.

use super::error::ApiError;
use super::markup::{Reader, Said};
use super::worker::Events;
use crate::engine::{Event, FinishReason, SampledToken, Usage};

/// News of one choice.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// Which choice.
    pub(super) index: usize,
    /// Whether it is the choice's first.
    pub(super) first: bool,
    pub(super) said: Said,
    pub(super) tokens: Vec<SampledToken>,
    /// `stop`, `length` or `tool_calls`: it is the choice's last.
    pub(super) finish: Option<&'static str>,
}

/// Tokens of a whole request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) prompt_tokens: u64,
    pub(super) completion_tokens: u64,
    pub(super) cached_tokens: u64,
}

struct Choice {
    reader: Reader,
    started: bool,
    finished: bool,
}

/// The choices of a request until all are finished.
pub(super) struct Pieces {
    events: Events,
    choices: Vec<Choice>,
    /// Choices per prompt: a prompt is counted once.
    n: usize,
    totals: Totals,
}

impl Pieces {
    /// `readers`: one per choice.
    pub(super) fn new(events: Events, readers: Vec<Reader>, n: usize) -> Self {
        let choice = |reader| Choice { reader, started: false, finished: false };
        Self { events, choices: readers.into_iter().map(choice).collect(), n, totals: Totals::default() }
    }

    /// Tokens so far; complete after the last piece.
    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    /// The next piece; `None` after the last choice's end.
    ///
    /// # Errors
    /// The model failed, or the server stops.
    pub(super) async fn next(&mut self) -> Result<Option<Piece>, ApiError> {
        loop {
            if self.choices.iter().all(|choice| choice.finished) {
                return Ok(None);
            }
            let (index, event) = self.events.recv().await.ok_or_else(ApiError::unavailable)?;
            if let Some(piece) = self.piece(index, event)? {
                return Ok(Some(piece));
            }
        }
    }

    fn piece(&mut self, index: usize, event: Event) -> Result<Option<Piece>, ApiError> {
        let Some(choice) = self.choices.get_mut(index) else { return Ok(None) };
        let (said, tokens, finish) = match event {
            Event::Started { .. } | Event::Embedding { .. } => return Ok(None),
            Event::Text { text, tokens, .. } => (choice.reader.push(&text), tokens, None),
            Event::Finished { reason, usage, .. } => {
                choice.finished = true;
                self.totals.add(usage, index.is_multiple_of(self.n));
                let finish = match reason {
                    FinishReason::Stop(_) if choice.reader.called() => "tool_calls",
                    FinishReason::Stop(_) => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Cancelled => return Err(ApiError::unavailable()),
                    FinishReason::Error(why) => return Err(ApiError::internal(why)),
                };
                (choice.reader.finish(), Vec::new(), Some(finish))
            }
        };
        let first = !std::mem::replace(&mut choice.started, true);
        Ok(Some(Piece { index, first, said, tokens, finish }))
    }
}

impl Totals {
    fn add(&mut self, usage: Usage, new_prompt: bool) {
        self.completion_tokens += u64::from(usage.completion_tokens);
        if new_prompt {
            self.prompt_tokens += u64::from(usage.prompt_tokens);
            self.cached_tokens += u64::from(usage.cached_tokens);
        }
    }
}
