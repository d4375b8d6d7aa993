//! One step ahead of the host.
//!
//! A step whose tokens the device chooses is *submitted*: queued, and collected later. Before it is collected the next
//! one is submitted, its rows fed on the device with the tokens that this one will choose, so that the device goes
//! from step to step without waiting for the host to read tokens, turn them into text and prepare a batch.
//!
//! The step ahead is a guess: that every sequence goes on. That one has ended (an end-of-generation token, a stop
//! string, a cancellation) is seen when its row ahead is queued already. That row's token is then dropped; what it
//! wrote, a position of a page and the state in a slot, is behind everything that the sequence shares, and is given
//! back at once: the device runs in the order of the calls, so whoever gets page or slot next writes them later.
//!
//! No step is queued ahead
//! - where a sequence needs the host between its tokens (grammar, penalties, biases, log probabilities), or the device
//!   cannot choose;
//! - where tokens are guessed ([`draft`](super::draft)): how far a sequence is depends on the guesses;
//! - while somebody waits with a prompt, which so is never delayed by more than the step that is under way;
//! - past a page border of a model with recurrent state: the state there may be kept for reuse, and is copied before
//!   the next step changes it;
//! - of a sequence that has all tokens it may have.

use super::Scheduler;
use super::step::{Chosen, Member, Plan};
use crate::backend::{Choose, Draw, PAGE_TOKENS, Span};
use crate::engine::event::SampledToken;
use crate::engine::sampler::SampleError;

/// A step that was begun.
pub(super) struct Flight {
    plan: Plan,
    /// Whether it was submitted, or why that failed; `None`: the host chooses, and the step is still to be run.
    submitted: Option<Result<(), String>>,
}

impl Scheduler {
    /// The step to be settled now: the one under way, unless nobody of it is left, or a new one.
    pub(super) fn next_flight(&mut self) -> Option<Flight> {
        if let Some(flight) = self.ahead.take() {
            if flight.plan.members.iter().any(|m| self.running.iter().any(|s| s.id == m.id)) {
                return Some(flight);
            }
            self.land(flight);
        }
        let plan = self.plan(false);
        if plan.members.is_empty() {
            return None;
        }
        let on_device = !plan.wants_logits && self.n_draft == 0 && self.executor.chooses();
        Some(if on_device { self.take_off(plan, Vec::new()) } else { Flight { plan, submitted: None } })
    }

    /// Queues the step after `flight`, if there is nothing to wait for.
    pub(super) fn look_ahead(&mut self, flight: &Flight) -> Option<Flight> {
        if !matches!(flight.submitted, Some(Ok(()))) {
            return None;
        }
        let members = &flight.plan.members;
        // Everybody who runs has a row that gives a token.
        if self.running.iter().any(|s| !members.iter().any(|m| m.id == s.id && m.output)) {
            return None;
        }
        let (mut plan, mut fed) = (Plan::default(), Vec::new());
        for (output, member) in (0..).zip(members.iter().filter(|m| m.output)) {
            let Some(i) = self.running.iter().position(|s| s.id == member.id) else { continue };
            let (sequence, rows) = (&self.running[i], member.rows);
            let start = sequence.computed + rows;
            if self.recurrent && sequence.held.node.is_some() && start.is_multiple_of(PAGE_TOKENS) {
                return None;
            }
            if !sequence.may_go_on() {
                continue;
            }
            if !self.grow(i, rows + 1) {
                return None;
            }
            let held = &self.running[i].held;
            let pages = held.pages[..(start + 1).div_ceil(PAGE_TOKENS) as usize].to_vec();
            plan.batch.tokens.push(0); // what `fed` says
            plan.batch.spans.push(Span { slot: held.slot, start, rows: 1, pages });
            plan.batch.outputs.push(fed.len() as u32);
            plan.members.push(Member { id: member.id, first: fed.len(), rows: 1, output: true, n_drafts: 0 });
            fed.push(Some(output));
        }
        (!plan.members.is_empty()).then(|| self.take_off(plan, fed))
    }

    /// Queues a step whose tokens the device chooses.
    fn take_off(&mut self, plan: Plan, fed: Vec<Option<u32>>) -> Flight {
        let mut draws = Vec::with_capacity(plan.batch.outputs.len());
        for member in plan.members.iter().filter(|m| m.output) {
            let sequence = self.running.iter_mut().find(|s| s.id == member.id);
            draws.push(sequence.map_or(Draw::GREEDY, |s| s.next_draw()));
        }
        if draws.iter().all(|draw| *draw == Draw::GREEDY) {
            draws.clear();
        }
        let choose = Choose { n_tokens: self.n_tokens, draws, fed };
        let submitted = self.executor.submit(&plan.batch, &choose).map_err(|e| e.to_string());
        Flight { plan, submitted: Some(submitted) }
    }

    /// Waits for a step and takes its results.
    pub(super) fn land(&mut self, flight: Flight) {
        let Flight { plan, submitted } = flight;
        let chosen = match submitted {
            None => self.compute(&plan),
            Some(submitted) => submitted.and_then(|()| self.collect(&plan)),
        };
        let is_done = chosen.is_ok();
        self.settle(&plan, chosen);
        if is_done {
            self.guess(&plan);
        }
    }

    /// The tokens that the device chose.
    fn collect(&mut self, plan: &Plan) -> Result<Vec<Chosen>, String> {
        self.executor.collect(&mut self.chosen).map_err(|e| e.to_string())?;
        if self.chosen.len() != plan.batch.outputs.len() {
            return Err("the model returned too few or too many tokens".to_owned());
        }
        let ids = plan.members.iter().filter(|m| m.output).map(|m| m.id);
        let token = |&id| vec![if id < self.n_tokens { Ok(SampledToken::bare(id)) } else { Err(SampleError::Broken) }];
        Ok(ids.zip(self.chosen.iter().map(token)).collect())
    }
}
