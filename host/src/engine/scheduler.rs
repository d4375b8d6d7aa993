//! Which sequences go through the model, and when.
//!
//! **Admission** is in order of arrival. A request starts when a slot is free and the pages it could come to need in
//! the worst case, `min(prompt + max_tokens, n_ctx)` tokens, can be reserved ([`pager`](super::pager)); without
//! `max_tokens` that is the whole context. So a running request is never stopped for lack of memory, at the price that
//! a request which asks for more than it uses keeps others waiting.
//!
//! **A step** is one batch: a row for every decoding sequence, then prompt rows in order of arrival until the batch is
//! full. A long prompt so delays running replies by one batch at a time, never by its whole length.

use std::collections::VecDeque;
use std::sync::Arc;

use rayon::prelude::*;

use super::error::EngineError;
use super::event::{Event, FinishReason, SampledToken, Stats, StopCause};
use super::options::EngineOptions;
use super::pager::Pager;
use super::prefix::{Found, PrefixCache, ROOT};
use super::request::{Request, RequestId, SubmitError};
use super::sampler::{SampleError, Sampler};
use super::sequence::{Goal, Reply, ReplyText, Sequence};
use crate::backend::{Batch, PAGE_TOKENS, Span};
use crate::model::session::Executor;
use crate::tokenizer::Tokenizer;

/// The queue, the running sequences and the memory they share.
pub struct Scheduler {
    executor: Box<dyn Executor>,
    tokenizer: Option<Arc<Tokenizer>>,
    n_vocab: u32,
    n_ctx: u32,
    n_batch: u32,
    n_queue: usize,
    queue: VecDeque<Sequence>,
    /// In order of arrival.
    running: Vec<Sequence>,
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
}

/// A batch and whose rows it has.
#[derive(Default)]
struct Plan {
    batch: Batch,
    members: Vec<Member>,
}

/// A sequence's part of a [`Plan`].
struct Member {
    id: RequestId,
    rows: u32,
    /// Whether its last row has logits.
    output: bool,
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
        let prefix = options.prefix_reuse.then(|| PrefixCache::new(recurrent, n_slots..limits.n_slots));
        let stats = Stats { n_slots, n_ctx, pages: limits.n_pages, ..Stats::default() };
        Ok(Self {
            executor,
            tokenizer,
            n_vocab,
            n_ctx,
            n_batch,
            n_queue: options.n_queue,
            queue: VecDeque::new(),
            running: Vec::new(),
            free_slots: (0..n_slots).rev().collect(),
            pager: Pager::new(limits.n_pages),
            prefix,
            recurrent,
            events: Vec::new(),
            next_id: 0,
            stats,
            output: Vec::new(),
        })
    }

    /// See [`Engine::submit`](super::Engine::submit).
    ///
    /// # Errors
    /// The request cannot run.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, SubmitError> {
        self.check(&request.prompt)?;
        let n_tokens = self.tokenizer.as_ref().map_or(self.n_vocab as usize, |t| t.n_vocab() as usize);
        let sampler = Sampler::new(request.sampling, &request.prompt, n_tokens, request.logprobs)?;
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
        let plan = self.plan(false);
        if !plan.members.is_empty() {
            self.run(&plan);
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

    /// The model.
    pub fn executor_mut(&mut self) -> &mut dyn Executor {
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

    // --- a step ------------------------------------------------------------------------------------

    /// The next batch: of replies, or of embeddings.
    fn plan(&mut self, embeddings: bool) -> Plan {
        let mut plan = Plan::default();
        let mut room = self.n_batch;
        let mut failed = Vec::new();
        for decoding in [true, false] {
            for i in 0..self.running.len() {
                let sequence = &self.running[i];
                if sequence.is_decoding() != decoding || sequence.wants_embedding() != embeddings {
                    continue;
                }
                let rows = sequence.next_rows(room);
                if rows == 0 {
                    continue;
                }
                if !self.grow(i, rows) {
                    failed.push(self.running[i].id);
                    continue;
                }
                plan.add(&self.running[i], rows);
                room -= rows;
            }
        }
        for id in failed {
            self.finish(id, FinishReason::Error("no KV page is left".into()));
        }
        plan
    }

    /// Gives a sequence the pages for `rows` more positions. They were reserved, so there are enough.
    fn grow(&mut self, i: usize, rows: u32) -> bool {
        let needed = (self.running[i].computed + rows).div_ceil(PAGE_TOKENS) as usize;
        let held = &mut self.running[i].held;
        while held.pages.len() < needed {
            let page = self.pager.take().or_else(|| {
                let prefix = self.prefix.as_mut()?;
                prefix.evict(&mut self.pager).then(|| self.pager.take()).flatten()
            });
            let Some(page) = page else { return false };
            held.pages.push(page);
            held.reserved = held.reserved.saturating_sub(1);
        }
        true
    }

    /// Runs a batch of replies, chooses their tokens and ends those that are complete.
    fn run(&mut self, plan: &Plan) {
        self.stats.steps += 1;
        if let Err(e) = self.executor.forward(&plan.batch, &mut self.output) {
            return self.fail(plan, &e.to_string());
        }
        let n_vocab = self.n_vocab as usize;
        if self.output.len() != plan.batch.outputs.len() * n_vocab {
            return self.fail(plan, "the model returned logits of the wrong shape");
        }
        for member in &plan.members {
            self.advance(member);
        }
        for (id, result) in self.sample(plan) {
            let Some(i) = self.running.iter().position(|s| s.id == id) else { continue };
            let reason = match result {
                Ok(token) => {
                    self.stats.generated_tokens += 1;
                    self.running[i].accept(token, &mut self.events)
                }
                Err(e) => Some(FinishReason::Error(e.to_string())),
            };
            if let Some(reason) = reason {
                self.finish(id, reason);
            }
        }
    }

    /// Chooses the next token of every sequence with logits, in parallel: each has its own sampler.
    fn sample(&mut self, plan: &Plan) -> Vec<(RequestId, Result<SampledToken, SampleError>)> {
        // Members and running sequences are not in the same order; every sequence is sought once.
        let mut by_id: Vec<_> = self.running.iter_mut().collect();
        by_id.sort_unstable_by_key(|s| s.id);
        let mut wanted: Vec<_> = plan.members.iter().filter(|m| m.output).map(|m| m.id).zip(0..).collect();
        wanted.sort_unstable();
        let mut rows: Vec<_> = self.output.chunks_exact_mut(self.n_vocab as usize).map(Some).collect();
        let mut work: Vec<(usize, &mut Sequence, &mut [f32])> = Vec::with_capacity(wanted.len());
        let mut sequences = by_id.into_iter();
        for (id, row) in wanted {
            let sequence = sequences.find(|s| s.id == id);
            let logits = rows.get_mut(row).and_then(Option::take);
            if let (Some(sequence), Some(logits)) = (sequence, logits) {
                work.push((row, sequence, logits));
            }
        }
        let mut results: Vec<_> =
            work.into_par_iter().map(|(row, s, logits)| (row, (s.id, s.sample(logits)))).collect();
        results.sort_unstable_by_key(|r| r.0);
        results.into_iter().map(|r| r.1).collect()
    }

    /// Runs a batch of prompts whose hidden states are wanted.
    fn run_hidden(&mut self, plan: &Plan) {
        self.stats.steps += 1;
        if let Err(e) = self.executor.hidden(&plan.batch, &mut self.output) {
            return self.fail(plan, &e.to_string());
        }
        let n_embd = self.output.len() / plan.batch.tokens.len();
        let mut rows = self.output.chunks_exact(n_embd.max(1));
        let mut done = Vec::new();
        for member in &plan.members {
            let Some(sequence) = self.running.iter_mut().find(|s| s.id == member.id) else { continue };
            sequence.computed += member.rows;
            self.stats.prompt_tokens += u64::from(member.rows);
            let Goal::Embedding(sum) = &mut sequence.goal else { continue };
            sum.resize(n_embd, 0.0);
            for row in rows.by_ref().take(member.rows as usize) {
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
            }
            if sequence.computed == sequence.n_prompt {
                let n = f64::from(sequence.n_prompt);
                let embedding = sum.iter().map(|sum| (sum / n) as f32).collect();
                self.events.push(Event::Embedding { id: member.id, embedding });
                done.push(member.id);
            }
        }
        for id in done {
            self.finish(id, FinishReason::Stop(StopCause::NoReply));
        }
    }

    /// Notes that a sequence's rows are computed, and keeps what others may use of them.
    fn advance(&mut self, member: &Member) {
        let Some(sequence) = self.running.iter_mut().find(|s| s.id == member.id) else { return };
        if !sequence.is_decoding() {
            self.stats.prompt_tokens += u64::from(member.rows);
        }
        sequence.computed += member.rows;
        let Some(prefix) = &mut self.prefix else { return };
        let held = &mut sequence.held;
        let Some(mut node) = held.node else { return };
        while (held.n_entered + 1) * PAGE_TOKENS <= sequence.computed {
            let i = held.n_entered as usize;
            let tokens = &sequence.tokens[i * PAGE_TOKENS as usize..][..PAGE_TOKENS as usize];
            (node, held.pages[i]) = prefix.insert(node, tokens, held.pages[i], &mut self.pager);
            held.n_entered += 1;
        }
        held.node = Some(node);

        let at_border = self.recurrent && sequence.computed == held.n_entered * PAGE_TOKENS;
        let in_prompt = held.checkpoints.contains(&sequence.computed);
        let in_reply = sequence.computed >= sequence.n_prompt;
        if !at_border || !(in_prompt || in_reply) {
            return;
        }
        let moved_from = if in_prompt { None } else { held.reply_checkpoint };
        if let Some(checkpoint) = prefix.checkpoint(node, moved_from) {
            if !in_prompt {
                held.reply_checkpoint = Some(node);
            }
            if let Err(e) = self.executor.copy_state(held.slot, checkpoint) {
                tracing::warn!("a checkpoint could not be kept: {e}");
                prefix.drop_checkpoint(node);
            }
        }
    }

    // --- the end -----------------------------------------------------------------------------------

    fn fail(&mut self, plan: &Plan, why: &str) {
        tracing::error!("a step of {} sequences failed: {why}", plan.members.len());
        for member in &plan.members {
            self.finish(member.id, FinishReason::Error(why.to_owned()));
        }
    }

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

impl Plan {
    fn add(&mut self, sequence: &Sequence, rows: u32) {
        let start = sequence.computed;
        let end = start + rows;
        self.batch.tokens.extend_from_slice(&sequence.tokens[start as usize..end as usize]);
        let pages = sequence.held.pages[..end.div_ceil(PAGE_TOKENS) as usize].to_vec();
        self.batch.spans.push(Span { slot: sequence.held.slot, start, rows, pages });
        let output = !sequence.wants_embedding() && rows == sequence.pending();
        if output {
            self.batch.outputs.push(self.batch.tokens.len() as u32 - 1);
        }
        self.members.push(Member { id: sequence.id, rows, output });
    }
}
