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

/// The next tokens of a request, or why it has none: one, and one more for each guess that was right.
pub(super) type Chosen = (RequestId, Vec<Result<SampledToken, SampleError>>);

/// A sequence's part of a [`Plan`].
pub(super) struct Member {
    pub(super) id: RequestId,
    /// Where its rows begin.
    pub(super) first: usize,
    pub(super) rows: u32,
    /// Whether its last row has logits.
    pub(super) output: bool,
    /// Rows at the end that are guesses; they and the one before them have logits.
    pub(super) n_drafts: u32,
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
                let [rows, n_drafts] = self.next_rows(i, room);
                if rows == 0 {
                    continue;
                }
                if !self.grow(i, self.reach(i, rows + n_drafts)) {
                    failed.push(self.running[i].id);
                    continue;
                }
                plan.add(&mut self.running[i], rows, n_drafts);
                room -= rows + n_drafts;
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
        let mut chosen: HashMap<_, _> = chosen.into_iter().collect();
        for member in &plan.members {
            let Some(i) = self.running.iter().position(|s| s.id == member.id) else { continue };
            if !self.running[i].is_decoding() {
                self.stats.prompt_tokens += u64::from(member.rows);
            }
            let (mut reason, mut n_taken) = (None, 0);
            for result in chosen.remove(&member.id).unwrap_or_default() {
                if reason.is_some() {
                    break;
                }
                reason = match result {
                    Ok(token) => {
                        self.stats.generated_tokens += 1;
                        n_taken += 1;
                        self.running[i].accept(token, &mut self.events)
                    }
                    Err(e) => Some(FinishReason::Error(e.to_string())),
                };
            }
            self.count_drafts(member, n_taken);
            // Of its rows, those of guesses that were not taken.
            let wrong = member.n_drafts.saturating_sub(n_taken.saturating_sub(1));
            let reason = if wrong > 0 && reason.is_none() && self.recurrent {
                self.roll_back(i)
            } else {
                self.advance(i, member, wrong);
                reason
            };
            if let Some(reason) = reason {
                self.finish(member.id, reason);
            }
        }
    }

    /// Runs the model and chooses a token for every output.
    pub(super) fn compute(&mut self, plan: &Plan) -> Result<Vec<Chosen>, String> {
        self.keep_states(plan)?;
        self.executor.forward(&plan.batch, &mut self.output).map_err(|e| e.to_string())?;
        if self.output.len() != plan.batch.outputs.len() * self.n_vocab as usize {
            return Err("the model returned logits of the wrong shape".to_owned());
        }
        Ok(self.sample(plan))
    }

    /// Chooses the next tokens of every sequence with logits, in parallel: each has its own sampler.
    fn sample(&mut self, plan: &Plan) -> Vec<Chosen> {
        let n_vocab = self.n_vocab as usize;
        let (mut rest, mut rows) = (self.output.as_mut_slice(), HashMap::new());
        for member in plan.members.iter().filter(|m| m.output) {
            let (own, others) = rest.split_at_mut((1 + member.n_drafts as usize) * n_vocab);
            let first = member.first + (member.rows - member.n_drafts) as usize;
            rows.insert(member.id, (own, &plan.batch.tokens[first..first + member.n_drafts as usize]));
            rest = others;
        }
        let work = self.running.iter_mut().filter_map(|s| Some((rows.remove(&s.id)?, s)));
        let work: Vec<_> = work.collect();
        let choose = |((logits, drafts), s): ((&mut [f32], &[u32]), &mut Sequence)| {
            let mut tokens = Vec::with_capacity(1 + drafts.len());
            for (i, logits) in logits.chunks_exact_mut(n_vocab).enumerate() {
                let token = s.sample(logits);
                let right = matches!((&token, drafts.get(i)), (Ok(token), Some(draft)) if token.id == *draft);
                tokens.push(token);
                if !right {
                    break;
                }
            }
            (s.id, tokens)
        };
        work.into_par_iter().map(choose).collect()
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

    /// Notes that a sequence's rows are computed, but for the last `wrong`, and keeps what others may use of them.
    fn advance(&mut self, i: usize, member: &Member, wrong: u32) {
        let sequence = &mut self.running[i];
        sequence.computed += member.rows - wrong;
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

        let at_border = self.recurrent && wrong == 0 && sequence.computed == held.n_entered * PAGE_TOKENS;
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

    pub(super) fn fail(&mut self, plan: &Plan, why: &str) {
        tracing::error!("a step of {} sequences failed: {why}", plan.members.len());
        for member in &plan.members {
            self.finish(member.id, FinishReason::Error(why.to_owned()));
        }
    }
}

impl Plan {
    /// Adds rows of a sequence, and `n_drafts` of its guesses after them.
    fn add(&mut self, sequence: &mut Sequence, rows: u32, n_drafts: u32) {
        let (first, start) = (self.batch.tokens.len(), sequence.computed);
        let end = start + rows + n_drafts;
        self.batch.tokens.extend_from_slice(&sequence.tokens[start as usize..(start + rows) as usize]);
        self.batch.tokens.extend(sequence.drafts.drain(..).take(n_drafts as usize));
        let pages = sequence.held.pages[..end.div_ceil(PAGE_TOKENS) as usize].to_vec();
        let rows = rows + n_drafts;
        self.batch.spans.push(Span { slot: sequence.held.slot, start, rows, pages });
        let output = !sequence.wants_embedding() && rows == sequence.pending() + n_drafts;
        if output {
            self.wants_logits |= !sequence.only_draws();
            let end = self.batch.tokens.len() as u32;
            self.batch.outputs.extend(end - 1 - n_drafts..end);
        }
        self.members.push(Member { id: sequence.id, first, rows, output, n_drafts });
    }
}
