//! Guesses checked beside the next token.
//!
//! A model that guesses further tokens ([`Executor::draft`](crate::model::executor::Executor::draft)) has its guesses
//! computed as rows after a sequence's next token. The sampler chooses from the first row as always; as long as what
//! it chooses is what was guessed, the next row's logits are those of the right text, and it chooses from them, too.
//! So the tokens are those that come without guesses, several a step.
//!
//! A wrong guess leaves keys and values behind, which the right token will write over, and recurrent state that is too
//! far. A copy of the state from before the step takes its place; the step's right tokens go through the model again
//! with the next one, in a step without guesses.
//!
//! Decoding rows do not cross a page border, so that the state there can be kept for reuse.

use super::Scheduler;
use super::step::{Member, Plan};
use crate::backend::PAGE_TOKENS;
use crate::engine::event::FinishReason;

impl Scheduler {
    /// Rows of a sequence to compute next, no more than `room`, and how many guesses after them.
    pub(super) fn next_rows(&self, i: usize, room: u32) -> [u32; 2] {
        let sequence = &self.running[i];
        let rows = sequence.next_rows(room);
        if self.n_draft == 0 || !sequence.is_decoding() {
            return [rows, 0];
        }
        let to_border = PAGE_TOKENS - sequence.computed % PAGE_TOKENS;
        let rows = rows.min(to_border);
        if rows < sequence.pending() {
            return [rows, 0];
        }
        let n_drafts = sequence.drafts.len() as u32;
        [rows, n_drafts.min(room - rows).min(to_border - rows).min(sequence.n_left().saturating_sub(1))]
    }

    /// Positions that a sequence needs pages for, where its next `rows` are computed and guessed from.
    pub(super) fn reach(&self, i: usize, rows: u32) -> u32 {
        let sequence = &self.running[i];
        (rows + self.n_draft).min(sequence.max_computed - sequence.computed).max(rows)
    }

    /// Where a sequence's state is kept while its guesses are computed.
    fn backup(&self, slot: u32) -> u32 {
        self.stats.n_slots + slot
    }

    /// Keeps the states of sequences with guesses.
    pub(super) fn keep_states(&mut self, plan: &Plan) -> Result<(), String> {
        if !self.recurrent {
            return Ok(());
        }
        for (member, span) in plan.members.iter().zip(&plan.batch.spans).filter(|(m, _)| m.n_drafts > 0) {
            debug_assert!(member.output);
            let backup = self.backup(span.slot);
            self.executor.copy_state(span.slot, backup).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Gives a sequence the state it had before the step.
    pub(super) fn roll_back(&mut self, i: usize) -> Option<FinishReason> {
        let slot = self.running[i].held.slot;
        let restored = self.executor.copy_state(self.backup(slot), slot);
        restored.err().map(|e| FinishReason::Error(e.to_string()))
    }

    /// Counts guesses.
    pub(super) fn count_drafts(&mut self, member: &Member, n_taken: u32) {
        self.stats.drafted_tokens += u64::from(member.n_drafts);
        self.stats.accepted_tokens += u64::from(n_taken.saturating_sub(1));
    }

    /// After a step: guesses what follows the tokens of its sequences.
    pub(super) fn guess(&mut self, plan: &Plan) {
        if self.n_draft == 0 {
            return;
        }
        let mut batch = plan.batch.clone();
        batch.outputs.clear();
        let mut guessing = Vec::new();
        for (member, span) in plan.members.iter().zip(&mut batch.spans) {
            let tokens = &mut batch.tokens[member.first..member.first + member.rows as usize];
            let Some(i) = self.running.iter().position(|s| s.id == member.id) else {
                tokens.fill(0); // it has ended: nobody reads what follows
                continue;
            };
            let sequence = &self.running[i];
            let following = sequence.tokens.iter().skip(span.start as usize + 1).copied();
            tokens.iter_mut().zip(following.chain(std::iter::repeat(0))).for_each(|(to, token)| *to = token);
            let last = sequence.computed.checked_sub(span.start + 1).filter(|last| *last < member.rows);
            let goes_on = sequence.is_decoding() && sequence.pending() == 1 && sequence.n_left() > self.n_draft;
            if let Some(last) = last
                && goes_on
                && sequence.takes_drafts()
            {
                span.pages.clone_from(&sequence.held.pages);
                batch.outputs.push(member.first as u32 + last);
                guessing.push(i);
            }
        }
        let mut ids = Vec::new();
        if let Err(e) = self.executor.draft(&batch, self.n_tokens, self.n_draft, &mut ids) {
            return self.fail(plan, &e.to_string());
        }
        for (i, drafts) in guessing.into_iter().zip(ids.chunks_exact(self.n_draft as usize)) {
            // What is no token is no guess, and neither is what follows it.
            self.running[i].drafts.extend(drafts.iter().take_while(|id| **id < self.n_tokens));
        }
    }
}
