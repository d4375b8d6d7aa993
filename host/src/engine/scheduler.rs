//! Which sequences go through the model, and when.
//!
//! **Admission** is in order of arrival. A request starts when a slot is free and the pages it could come to need in
//! the worst case, `min(prompt + max_tokens, n_ctx)` tokens, can be reserved ([`pager`](super::pager)); without
//! `max_tokens` that is the whole context. So a running request is never stopped for lack of memory, at the price that
//! a request which asks for more than it uses keeps others waiting.
//!
//! **A step** is one batch: a row for every decoding sequence, then prompt rows in order of arrival until the batch is
//! full. A long prompt so delays running replies by one batch at a time, never by its whole length.
//!
//! **A step ahead.** Where the device chooses the tokens, the next step is queued before the ones of this step are
//! read ([`ahead`]), so that the device never waits for the host.
//!
//! **Guesses.** Where the model can guess tokens and is asked to, a step computes guesses beside the next token of each
//! sequence ([`draft`]).

mod ahead;
mod draft;
mod step;

use std::collections::VecDeque;
use std::sync::Arc;

use super::error::EngineError;
use super::event::{Event, FinishReason, Stats};
use super::options::EngineOptions;
use super::pager::Pager;
use super::prefix::{Found, PrefixCache, ROOT};
use super::request::{Request, RequestId, SubmitError};
use super::sampler::Sampler;
use super::sequence::{Goal, Reply, ReplyText, Sequence};
use crate::backend::PAGE_TOKENS;
use crate::model::executor::Executor;
use crate::tokenizer::Tokenizer;
use ahead::Flight;

/// The queue, the running sequences and the memory they share.
pub struct Scheduler {
    executor: Box<dyn Executor>,
    tokenizer: Option<Arc<Tokenizer>>,
    n_vocab: u32,
    /// Ids from here on pad the head and are never chosen.
    n_tokens: u32,
    n_ctx: u32,
    n_batch: u32,
    /// Tokens to guess after each; 0: none.
    n_draft: u32,
    n_queue: usize,
    queue: VecDeque<Sequence>,
    /// In order of arrival.
    running: Vec<Sequence>,
    /// The step that the device runs while the host does not look.
    ahead: Option<Flight>,
    free_slots: Vec<u32>,
    pager: Pager,
    prefix: Option<PrefixCache>,
    recurrent: bool,
    /// What happened since the last step's events were handed out.
    events: Vec<Event>,
    next_id: u64,
    stats: Stats,
    /// Output of the last step: logits `[outputs, n_vocab]`, or hidden states.
    output: Vec<f32>,
    /// Tokens that the device chose in the last step.
    chosen: Vec<u32>,
}

impl Scheduler {
    /// An idle scheduler.
    ///
    /// # Errors
    /// The executor has no room for a sequence.
    pub fn new(
        executor: Box<dyn Executor>,
        tokenizer: Option<Arc<Tokenizer>>,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        let limits = executor.limits();
        let config = executor.config();
        let (n_vocab, recurrent) = (config.n_vocab as u32, config.state_elems_per_sequence() > 0);
        let n_tokens = tokenizer.as_ref().map_or(n_vocab, |t| t.n_vocab().min(n_vocab));
        // Every decoding sequence has a row and an output in every batch.
        let n_slots = options.n_slots.min(limits.n_slots).min(limits.n_batch).min(limits.n_outputs);
        let n_batch = options.n_batch.min(limits.n_batch);
        let n_ctx = options.n_ctx.unwrap_or(u32::MAX).min(limits.n_pages.saturating_mul(PAGE_TOKENS));
        for (option, value) in [("slots", n_slots), ("batch", n_batch), ("ctx", n_ctx)] {
            if value == 0 {
                let why = "the engine needs at least one".to_owned();
                return Err(EngineError::Option { option, value: 0, why });
            }
        }
        let n_slots = n_slots.min(n_batch);
        let n_draft = options.n_draft;
        if n_draft > 0 {
            let room = limits.n_outputs / n_slots > n_draft && (!recurrent || limits.n_slots / n_slots > 1);
            let why = match (executor.drafts(), room) {
                (false, _) => "the model has no block that predicts further tokens",
                (true, false) => "there is no room for guesses",
                (true, true) => "",
            };
            if !why.is_empty() {
                return Err(EngineError::Option { option: "draft", value: n_draft.into(), why: why.to_owned() });
            }
        }
        // Behind the sequences' slots, one for each to go back to where a guess was wrong; then checkpoints.
        let n_taken = if n_draft > 0 { 2 * n_slots } else { n_slots };
        let prefix = options.prefix_reuse.then(|| PrefixCache::new(recurrent, n_taken..limits.n_slots));
        let stats = Stats { n_slots, n_ctx, pages: limits.n_pages, ..Stats::default() };
        Ok(Self {
            executor,
            tokenizer,
            n_vocab,
            n_tokens,
            n_ctx,
            n_batch,
            n_draft,
            n_queue: options.n_queue,
            queue: VecDeque::new(),
            running: Vec::new(),
            ahead: None,
            free_slots: (0..n_slots).rev().collect(),
            pager: Pager::new(limits.n_pages),
            prefix,
            recurrent,
            events: Vec::new(),
            next_id: 0,
            stats,
            output: Vec::new(),
            chosen: Vec::new(),
        })
    }

    /// See [`Engine::submit`](super::Engine::submit).
    ///
    /// # Errors
    /// The request cannot run.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, SubmitError> {
        self.check(&request.prompt)?;
        let sampler = Sampler::new(request.sampling, &request.prompt, self.n_tokens as usize, request.logprobs)?;
        let room = self.n_ctx - request.prompt.len() as u32;
        let max_tokens = request.max_tokens.unwrap_or(u32::MAX).min(room);
        let stream = self.tokenizer.as_ref().map(|t| if request.special { t.stream_special() } else { t.stream() });
        let reply = Reply {
            sampler,
            mask: request.mask,
            text: ReplyText::new(stream, request.stop),
            tokenizer: self.tokenizer.clone(),
            ignore_eos: request.ignore_eos,
            n_generated: 0,
            max_tokens,
        };
        let sequence = Sequence::new(self.new_id(), Goal::Reply(Box::new(reply)), request.prompt);
        let id = sequence.id;
        if max_tokens == 0 {
            self.report(&sequence, FinishReason::Length);
        } else {
            self.queue.push_back(sequence);
        }
        Ok(id)
    }

    /// See [`Engine::submit_embedding`](super::Engine::submit_embedding).
    ///
    /// # Errors
    /// The request cannot run.
    pub fn submit_embedding(&mut self, prompt: Vec<u32>) -> Result<RequestId, SubmitError> {
        self.check(&prompt)?;
        let sequence = Sequence::new(self.new_id(), Goal::Embedding(Vec::new()), prompt);
        let id = sequence.id;
        self.queue.push_back(sequence);
        Ok(id)
    }

    fn check(&self, prompt: &[u32]) -> Result<(), SubmitError> {
        if prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if prompt.len() > self.n_ctx as usize {
            return Err(SubmitError::ContextLengthExceeded { prompt: prompt.len(), n_ctx: self.n_ctx });
        }
        if let Some(&id) = prompt.iter().find(|&&id| id >= self.n_vocab) {
            return Err(SubmitError::TokenOutOfRange { id, n_vocab: self.n_vocab });
        }
        if self.queue.len() >= self.n_queue.saturating_add(self.free_slots.len()) {
            return Err(SubmitError::QueueFull { waiting: self.queue.len() });
        }
        Ok(())
    }

    fn new_id(&mut self) -> RequestId {
        self.next_id += 1;
        RequestId(self.next_id)
    }

    /// See [`Engine::cancel`](super::Engine::cancel).
    pub fn cancel(&mut self, id: RequestId) {
        if let Some(at) = self.queue.iter().position(|s| s.id == id)
            && let Some(sequence) = self.queue.remove(at)
        {
            self.report(&sequence, FinishReason::Cancelled);
        }
        self.finish(id, FinishReason::Cancelled);
    }

    /// See [`Engine::step`](super::Engine::step).
    pub fn step(&mut self) -> Vec<Event> {
        self.admit();
        if let Some(flight) = self.next_flight() {
            self.ahead = self.look_ahead(&flight);
            self.land(flight);
        }
        let plan = self.plan(true);
        if !plan.members.is_empty() {
            self.run_hidden(&plan);
        }
        std::mem::take(&mut self.events)
    }

    /// Whether a step would do nothing.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running.is_empty() && self.events.is_empty()
    }

    /// Counters and levels.
    pub fn stats(&self) -> Stats {
        let cached = self.prefix.as_ref().map_or(0, |p| p.evictable(&self.pager));
        Stats {
            queued: self.queue.len(),
            running: self.running.len(),
            pages_used: self.pager.n_pages() - self.pager.n_free() - cached,
            pages_cached: cached,
            ..self.stats
        }
    }

    /// Tokens a sequence can hold.
    pub fn n_ctx(&self) -> u32 {
        self.n_ctx
    }

    /// The model, with no step under way that was not asked for.
    pub fn executor_mut(&mut self) -> &mut dyn Executor {
        if let Some(flight) = self.ahead.take() {
            self.land(flight);
        }
        self.executor.as_mut()
    }

    // --- admission ---------------------------------------------------------------------------------

    /// Starts waiting requests, first come first served, while there is a slot and memory.
    fn admit(&mut self) {
        while let (Some(next), Some(&slot)) = (self.queue.front(), self.free_slots.last()) {
            let found = match &mut self.prefix {
                // An embedding needs the hidden states of all its tokens.
                Some(prefix) if !next.wants_embedding() => prefix.find(&next.tokens),
                _ => Found { node: ROOT, pages: Vec::new(), checkpoint: None, common_pages: 0 },
            };
            let needed = next.max_computed.div_ceil(PAGE_TOKENS) - found.pages.len() as u32;
            // Held before the others are counted as evictable, or they could be counted and evicted.
            found.pages.iter().for_each(|&page| self.pager.share(page));
            let evictable = self.prefix.as_ref().map_or(0, |p| p.evictable(&self.pager));
            if !self.pager.reserve(needed, evictable) {
                found.pages.iter().for_each(|&page| self.pager.release(page));
                return;
            }
            self.free_slots.pop();
            let Some(mut sequence) = self.queue.pop_front() else { return };
            sequence.start();
            sequence.held.slot = slot;
            sequence.held.reserved = needed;
            self.enter(sequence, found);
        }
    }

    /// Lets an admitted sequence begin after the prefix that was found.
    fn enter(&mut self, mut sequence: Sequence, found: Found) {
        let id = sequence.id;
        let n_found = found.pages.len() as u32;
        sequence.cached = n_found * PAGE_TOKENS;
        sequence.computed = sequence.cached;
        sequence.held.pages = found.pages;
        sequence.held.n_entered = n_found;
        sequence.held.node = (self.prefix.is_some() && !sequence.wants_embedding()).then_some(found.node);
        if self.recurrent && sequence.held.node.is_some() {
            let last = (sequence.n_prompt - 1) / PAGE_TOKENS;
            let mut at: Vec<u32> = [found.common_pages, last].into_iter().filter(|&n| n > n_found).collect();
            at.dedup();
            sequence.held.checkpoints = at.into_iter().map(|n| n * PAGE_TOKENS).collect();
        }
        self.stats.cached_tokens += u64::from(sequence.cached);
        self.events.push(Event::Started { id, cached_tokens: sequence.cached });
        let slot = sequence.held.slot;
        self.running.push(sequence);
        if let Some(checkpoint) = found.checkpoint
            && let Err(e) = self.executor.copy_state(checkpoint, slot)
        {
            self.finish(id, FinishReason::Error(e.to_string()));
        }
    }

    // --- the end -----------------------------------------------------------------------------------

    /// Ends a running request and frees what it holds.
    fn finish(&mut self, id: RequestId, reason: FinishReason) {
        let Some(at) = self.running.iter().position(|s| s.id == id) else { return };
        let sequence = self.running.remove(at);
        sequence.held.pages.iter().for_each(|&page| self.pager.release(page));
        self.pager.unreserve(sequence.held.reserved);
        self.free_slots.push(sequence.held.slot);
        self.report(&sequence, reason);
    }

    fn report(&mut self, sequence: &Sequence, reason: FinishReason) {
        self.stats.finished += 1;
        match reason {
            FinishReason::Error(_) => self.stats.failed += 1,
            FinishReason::Cancelled => self.stats.cancelled += 1,
            FinishReason::Stop(_) | FinishReason::Length => {}
        }
        self.events.push(sequence.finished(reason));
    }
}
