//! One request on its way through the engine.

use std::sync::Arc;
use std::time::Instant;

use super::event::{Event, FinishReason, SampledToken, StopCause, Timings, Usage};
use super::prefix::{NodeId, ROOT};
use super::request::{RequestId, TokenMask};
use super::sampler::{SampleError, Sampler};
use super::stop::{Matched, StopMatcher};
use crate::backend::Draw;
use crate::tokenizer::{TokenStream, Tokenizer};

/// A request, its tokens, and what it holds while it runs.
pub(super) struct Sequence {
    pub(super) id: RequestId,
    pub(super) goal: Goal,
    /// The prompt, then the reply.
    pub(super) tokens: Vec<u32>,
    pub(super) n_prompt: u32,
    /// Positions whose keys, values and state are computed; the others are still to go through the model.
    pub(super) computed: u32,
    /// Prompt positions that were there already.
    pub(super) cached: u32,
    /// Most tokens that may go through the model: the worst case that pages are reserved for.
    pub(super) max_computed: u32,
    pub(super) held: Held,
    /// Guesses of the tokens that follow.
    pub(super) drafts: Vec<u32>,
    pub(super) clock: Clock,
}

/// What a request wants.
pub(super) enum Goal {
    Reply(Box<Reply>),
    /// The mean hidden state of the prompt; so far its sum, `[n_embd]`.
    Embedding(Vec<f64>),
}

/// What a running sequence holds.
#[derive(Default)]
pub(super) struct Held {
    /// Indexes the recurrent state.
    pub(super) slot: u32,
    /// Pages of positions `0 ..`, in order.
    pub(super) pages: Vec<u32>,
    /// Pages it may still take.
    pub(super) reserved: u32,
    /// Its deepest page in the prefix cache, and how many pages lead there.
    pub(super) node: Option<NodeId>,
    pub(super) n_entered: u32,
    /// Positions of the prompt after which the recurrent state is to be kept, ascending.
    pub(super) checkpoints: Vec<u32>,
    /// Where its reply's last checkpoint is.
    pub(super) reply_checkpoint: Option<NodeId>,
}

/// When things happened.
pub(super) struct Clock {
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

/// The generating side of a request.
pub(super) struct Reply {
    pub(super) sampler: Sampler,
    pub(super) mask: Option<Box<dyn TokenMask>>,
    pub(super) text: ReplyText,
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    pub(super) ignore_eos: bool,
    pub(super) n_generated: u32,
    /// Tokens it may generate, from `max_tokens` and the context.
    pub(super) max_tokens: u32,
}

/// From tokens to text that is certain to be part of the reply.
pub(super) struct ReplyText {
    stream: Option<TokenStream>,
    stop: StopMatcher,
}

impl Sequence {
    pub(super) fn new(id: RequestId, goal: Goal, prompt: Vec<u32>) -> Self {
        let n_prompt = prompt.len() as u32;
        let max_computed = match &goal {
            // The last token of a reply is not computed.
            Goal::Reply(reply) => n_prompt + reply.max_tokens.saturating_sub(1),
            Goal::Embedding(_) => n_prompt,
        };
        let clock = Clock { submitted: Instant::now(), started: None, first_token: None, last_token: None };
        let held = Held { node: Some(ROOT), ..Held::default() };
        Self {
            id,
            goal,
            tokens: prompt,
            n_prompt,
            computed: 0,
            cached: 0,
            max_computed,
            held,
            drafts: Vec::new(),
            clock,
        }
    }

    /// Tokens that have not been through the model.
    pub(super) fn pending(&self) -> u32 {
        self.tokens.len() as u32 - self.computed
    }

    /// Whether the prompt is done and every step gives a token.
    pub(super) fn is_decoding(&self) -> bool {
        matches!(&self.goal, Goal::Reply(reply) if reply.n_generated > 0)
    }

    pub(super) fn wants_embedding(&self) -> bool {
        matches!(self.goal, Goal::Embedding(_))
    }

    /// Rows to compute next: no more than `room`, and none past the next checkpoint.
    pub(super) fn next_rows(&self, room: u32) -> u32 {
        let rows = self.pending().min(room);
        match self.held.checkpoints.iter().find(|&&at| at > self.computed) {
            Some(at) => rows.min(at - self.computed),
            None => rows,
        }
    }

    pub(super) fn start(&mut self) {
        self.clock.started = Some(Instant::now());
    }

    /// Whether the device can choose the next token.
    pub(super) fn only_draws(&self) -> bool {
        matches!(&self.goal, Goal::Reply(reply) if reply.mask.is_none() && reply.sampler.only_draws())
    }

    /// How the device is to choose the next token; each call is for one token.
    pub(super) fn next_draw(&mut self) -> Draw {
        match &mut self.goal {
            Goal::Reply(reply) => reply.sampler.next_draw(),
            Goal::Embedding(_) => Draw::GREEDY,
        }
    }

    /// Whether a token may follow the one that is being computed.
    pub(super) fn may_go_on(&self) -> bool {
        self.n_left() > 1
    }

    /// Tokens that it may still have.
    pub(super) fn n_left(&self) -> u32 {
        match &self.goal {
            Goal::Reply(reply) => reply.max_tokens.saturating_sub(reply.n_generated),
            Goal::Embedding(_) => 0,
        }
    }

    /// Whether several tokens may be chosen before any is taken into the reply.
    pub(super) fn takes_drafts(&self) -> bool {
        matches!(&self.goal, Goal::Reply(reply) if reply.mask.is_none())
    }

    /// Chooses the next token from `logits`, `[n_vocab]`.
    pub(super) fn sample(&mut self, logits: &mut [f32]) -> Result<SampledToken, SampleError> {
        let Goal::Reply(reply) = &mut self.goal else { return Err(SampleError::NothingAllowed) };
        // `as_deref_mut` would give the object the lifetime of its box.
        let mask = reply.mask.as_mut().map(|m| m.as_mut() as &mut dyn TokenMask);
        reply.sampler.sample(logits, mask)
    }

    /// Takes the chosen token into the reply. `Some`: it was the last one.
    pub(super) fn accept(&mut self, token: SampledToken, events: &mut Vec<Event>) -> Option<FinishReason> {
        let Goal::Reply(reply) = &mut self.goal else { return None };
        let now = Instant::now();
        self.clock.first_token.get_or_insert(now);
        self.clock.last_token = Some(now);
        self.tokens.push(token.id);
        let (text, token, reason) = reply.accept(token);
        if !text.is_empty() || token.is_some() {
            events.push(Event::Text { id: self.id, text, tokens: token.into_iter().collect() });
        }
        reason
    }

    /// The last event of this request.
    pub(super) fn finished(&self, reason: FinishReason) -> Event {
        let completion_tokens = self.tokens.len() as u32 - self.n_prompt;
        let usage = Usage { prompt_tokens: self.n_prompt, completion_tokens, cached_tokens: self.cached };
        Event::Finished { id: self.id, reason, usage, timings: self.clock.timings() }
    }
}

impl Reply {
    /// The text that is certain now, the token unless it is no part of the reply, and why the reply ends if it does.
    fn accept(&mut self, token: SampledToken) -> (String, Option<SampledToken>, Option<FinishReason>) {
        self.n_generated += 1;
        let id = token.id;
        if let Some(mask) = &mut self.mask {
            mask.accept(id);
        }
        if !self.ignore_eos && self.tokenizer.as_ref().is_some_and(|t| t.is_eog(id)) {
            let (text, reason) = self.text.end(FinishReason::Stop(StopCause::EndOfGeneration(id)));
            return (text, None, Some(reason));
        }
        let (mut text, mut reason) = self.text.push(id);
        let ended = if self.mask.as_ref().is_some_and(|m| m.is_done()) {
            Some(FinishReason::Stop(StopCause::Mask))
        } else if self.n_generated >= self.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        };
        if let (None, Some(ended)) = (&reason, ended) {
            let (rest, ended) = self.text.end(ended);
            text.push_str(&rest);
            reason = Some(ended);
        }
        (text, Some(token), reason)
    }
}

impl ReplyText {
    pub(super) fn new(stream: Option<TokenStream>, stop: Vec<String>) -> Self {
        Self { stream, stop: StopMatcher::new(stop) }
    }

    fn push(&mut self, id: u32) -> (String, Option<FinishReason>) {
        let Some(stream) = &mut self.stream else { return (String::new(), None) };
        let piece = stream.push(id);
        check(&mut self.stop, piece)
    }

    /// Releases everything held back; a stop string in it takes precedence over `reason`.
    fn end(&mut self, reason: FinishReason) -> (String, FinishReason) {
        let Some(stream) = &mut self.stream else { return (String::new(), reason) };
        let piece = stream.finish();
        match check(&mut self.stop, piece) {
            (text, Some(stop)) => (text, stop),
            (mut text, None) => {
                text.push_str(&self.stop.finish());
                (text, reason)
            }
        }
    }
}

fn check(stop: &mut StopMatcher, piece: &str) -> (String, Option<FinishReason>) {
    match stop.push(piece) {
        Matched::Text(text) => (text, None),
        Matched::Stop { text, stop } => {
            let cause = StopCause::StopString(stop.to_owned());
            (text, Some(FinishReason::Stop(cause)))
        }
    }
}

impl Clock {
    fn timings(&self) -> Timings {
        let now = Instant::now();
        let started = self.started.unwrap_or(now);
        let first = self.first_token.unwrap_or(now).max(started);
        Timings {
            queued: started - self.submitted,
            prefill: first - started,
            decode: self.last_token.unwrap_or(first).saturating_duration_since(first),
        }
    }
}
