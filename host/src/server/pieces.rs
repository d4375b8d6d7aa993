//! The events of a request's choices, in the terms of the API. Streams and whole replies are both made of these, which
//! is why they are equal.

use super::error::ApiError;
use super::reasoning::{Split, Splitter};
use super::tools::{Call, CallSplitter};
use super::worker::Events;
use crate::engine::{Event, FinishReason, SampledToken, Usage};

/// News of one choice.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// Which choice.
    pub(super) index: usize,
    /// Whether it is the choice's first.
    pub(super) first: bool,
    pub(super) split: Split,
    /// Calls of tools that are complete, and how many there were before.
    pub(super) calls: Vec<Call>,
    pub(super) n_calls: usize,
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
    splitter: Splitter,
    /// Where tools were offered.
    calls: Option<CallSplitter>,
    n_calls: usize,
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
    /// `splitters`: one per choice; `tools`: whether calls are to be looked for.
    pub(super) fn new(events: Events, splitters: Vec<Splitter>, tools: bool, n: usize) -> Self {
        let calls = || tools.then(CallSplitter::default);
        let choice = |splitter| Choice { splitter, calls: calls(), n_calls: 0, started: false, finished: false };
        Self { events, choices: splitters.into_iter().map(choice).collect(), n, totals: Totals::default() }
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
        let (mut split, tokens, mut finish) = match event {
            Event::Started { .. } | Event::Embedding { .. } => return Ok(None),
            Event::Text { text, tokens, .. } => (choice.splitter.push(&text), tokens, None),
            Event::Finished { reason, usage, .. } => {
                choice.finished = true;
                self.totals.add(usage, index.is_multiple_of(self.n));
                let finish = match reason {
                    FinishReason::Stop(_) => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Cancelled => return Err(ApiError::unavailable()),
                    FinishReason::Error(why) => return Err(ApiError::internal(why)),
                };
                (choice.splitter.finish(), Vec::new(), Some(finish))
            }
        };
        let n_calls = choice.n_calls;
        let calls = choice.take_calls(&mut split, finish.is_some());
        if finish == Some("stop") && choice.n_calls > 0 {
            finish = Some("tool_calls");
        }
        let first = !std::mem::replace(&mut choice.started, true);
        Ok(Some(Piece { index, first, split, calls, n_calls, tokens, finish }))
    }
}

impl Choice {
    /// Takes the calls out of the content.
    fn take_calls(&mut self, split: &mut Split, ended: bool) -> Vec<Call> {
        let Some(splitter) = &mut self.calls else { return Vec::new() };
        let (content, calls) = splitter.push(&split.content);
        split.content = content;
        self.n_calls += calls.len();
        if ended {
            split.content.push_str(&splitter.finish(self.n_calls > 0));
        }
        calls
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
