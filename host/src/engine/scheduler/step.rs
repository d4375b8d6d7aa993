//! One step: what goes into the batch, and what becomes of its results.

use std::collections::HashMap;

use rayon::prelude::*;

use super::Scheduler;
use crate::backend::{Batch, PAGE_TOKENS, Span};
use crate::engine::event::{Event, FinishReason, SampledToken, StopCause};
use crate::engine::request::RequestId;
use crate::engine::sampler::SampleError;
use crate::engine::sequence::{Goal, Sequence};

/// A batch and whose rows it has.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) batch: Batch,
    /// Whether an output needs its logits on the host.
    pub(super) wants_logits: bool,
    pub(super) members: Vec<Member>,
}

/// The next token of a request, or why it has none.
pub(super) type Chosen = (RequestId, Result<SampledToken, SampleError>);

/// A sequence's part of a [`Plan`].
pub(super) struct Member {
    pub(super) id: RequestId,
    pub(super) rows: u32,
    /// Whether its last row has logits.
    pub(super) output: bool,
}

impl Scheduler {
    /// The next batch: of replies, or of embeddings.
    pub(super) fn plan(&mut self, embeddings: bool) -> Plan {
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
    pub(super) fn grow(&mut self, i: usize, rows: u32) -> bool {
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

    /// Takes the results of a step: its tokens, and the end of the sequences that are complete.
    pub(super) fn settle(&mut self, plan: &Plan, chosen: Result<Vec<Chosen>, String>) {
        self.stats.steps += 1;
        let chosen = match chosen {
            Ok(chosen) => chosen,
            Err(why) => return self.fail(plan, &why),
        };
        for member in &plan.members {
            self.advance(member);
        }
        for (id, result) in chosen {
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

    /// Runs the model and chooses a token for every output.
    pub(super) fn compute(&mut self, plan: &Plan) -> Result<Vec<Chosen>, String> {
        self.executor.forward(&plan.batch, &mut self.output).map_err(|e| e.to_string())?;
        if self.output.len() != plan.batch.outputs.len() * self.n_vocab as usize {
            return Err("the model returned logits of the wrong shape".to_owned());
        }
        Ok(self.sample(plan))
    }

    /// Chooses the next token of every sequence with logits, in parallel: each has its own sampler.
    fn sample(&mut self, plan: &Plan) -> Vec<Chosen> {
        let ids = plan.members.iter().filter(|m| m.output).map(|m| m.id);
        let mut rows: HashMap<_, _> = ids.zip(self.output.chunks_exact_mut(self.n_vocab as usize)).collect();
        let work = self.running.iter_mut().filter_map(|s| Some((rows.remove(&s.id)?, s)));
        let work: Vec<_> = work.collect();
        work.into_par_iter().map(|(logits, s)| (s.id, s.sample(logits))).collect()
    }

    /// Runs a batch of prompts whose hidden states are wanted.
    pub(super) fn run_hidden(&mut self, plan: &Plan) {
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

    fn fail(&mut self, plan: &Plan, why: &str) {
        tracing::error!("a step of {} sequences failed: {why}", plan.members.len());
        for member in &plan.members {
            self.finish(member.id, FinishReason::Error(why.to_owned()));
        }
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
            self.wants_logits |= !sequence.only_draws();
            self.batch.outputs.push(self.batch.tokens.len() as u32 - 1);
        }
        self.members.push(Member { id: sequence.id, rows, output });
    }
}
