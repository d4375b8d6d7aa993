//! A model without weights, for tests of everything above it.
//!
//! It keeps, like a model, one entry a position in the pages and one state a slot, but the entry is the token itself
//! and the state a hash of all tokens. Logits are a function of the whole history read back from the pages, so a
//! sequence that was given a wrong page, position or state gets a different reply, or an error where the mock can
//! tell: pages and state that disagree, gaps, slots or pages written by two sequences.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use super::sampler::{argmax, draw_one};
use crate::backend::{Batch, Choose, Error, PAGE_TOKENS, Result, Span};
use crate::model::config::Config;
use crate::model::executor::{Executor, Limits, MAX_IN_FLIGHT, NO_TOKEN};

/// A model without weights.
pub struct Mock {
    config: Config,
    limits: Limits,
    pages: Vec<[Option<u32>; PAGE_TOKENS as usize]>,
    /// Hash of the tokens each slot has seen; `None` until its first position.
    states: Vec<Option<u64>>,
    script: Script,
    log: Arc<Mutex<Log>>,
    /// Tokens chosen in the last step that chose, and those of steps that were not collected.
    chosen: Vec<u32>,
    in_flight: VecDeque<Result<Vec<u32>>>,
}

/// What a [`Mock`] is to say and when it is to fail.
#[derive(Clone, Default)]
pub struct Script {
    /// Prompts and their replies; after these, and for other prompts, tokens are drawn from a hash.
    pub replies: Vec<(Vec<u32>, Vec<u32>)>,
    /// A batch with this token fails as if memory ran out.
    pub fail_on: Option<u32>,
    /// The logits after this token are NaN.
    pub nan_after: Option<u32>,
    /// The mock can choose tokens itself.
    pub chooses: bool,
    /// A batch with this token fails when its tokens are collected, as if the device had failed meanwhile.
    pub fail_late_on: Option<u32>,
    /// This token is never drawn from the hash (an end-of-generation token).
    pub never: Option<u32>,
}

/// What a [`Mock`] was asked for.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// Rows of every span of every batch.
    pub batches: Vec<Vec<u32>>,
    /// State copies.
    pub copies: usize,
    /// Batches whose tokens the mock chose itself.
    pub submitted: usize,
    /// Of those the ones that took tokens from the batch before.
    pub fed: usize,
}

impl Mock {
    /// A mock of a model of this shape.
    pub fn new(config: Config, limits: Limits, script: Script) -> Self {
        let pages = vec![[None; PAGE_TOKENS as usize]; limits.n_pages as usize];
        let states = vec![None; limits.n_slots as usize];
        let (log, chosen, in_flight) = (Arc::default(), Vec::new(), VecDeque::new());
        Self { config, limits, pages, states, script, log, chosen, in_flight }
    }

    /// What it was asked for, also after an engine has taken it.
    pub fn log(&self) -> Arc<Mutex<Log>> {
        self.log.clone()
    }

    /// The reply to `prompt` that a sequence of its own gets: the specification of what an engine must give.
    pub fn solo(config: &Config, script: &Script, prompt: &[u32], n: usize) -> Vec<u32> {
        let mut history = prompt.to_vec();
        for _ in 0..n {
            history.push(next_token(config, script, &history));
        }
        history.split_off(prompt.len())
    }

    fn run(&mut self, batch: &Batch, mut row: impl FnMut(&[u32])) -> Result {
        self.check(batch)?;
        let mut first = 0;
        for span in &batch.spans {
            let tokens = &batch.tokens[first..first + span.rows as usize];
            first += span.rows as usize;
            let mut history = self.history(span)?;
            self.enter(span, tokens);
            let before = if span.start == 0 { Some(hash(&[])) } else { self.states[span.slot as usize] };
            if self.config.state_elems_per_sequence() > 0 && before != Some(hash(&history)) {
                return broken(format!("slot {} has the state of other tokens than its pages", span.slot));
            }
            for &token in tokens {
                history.push(token);
                row(&history);
            }
            self.states[span.slot as usize] = Some(hash(&history));
        }
        let rows = batch.spans.iter().map(|s| s.rows).collect();
        self.log.lock().expect("no test holds the log over a panic").batches.push(rows);
        if let Some(token) = self.script.fail_on
            && batch.tokens.contains(&token)
        {
            return Err(Error::OutOfMemory { what: "a test".into(), needed: 1, free: 0 });
        }
        Ok(())
    }

    /// The tokens before a span, from its pages.
    fn history(&self, span: &Span) -> Result<Vec<u32>> {
        let read = |position: u32| {
            let page = span.pages[(position / PAGE_TOKENS) as usize];
            self.pages[page as usize][(position % PAGE_TOKENS) as usize]
        };
        let history: Option<Vec<u32>> = (0..span.start).map(read).collect();
        history.map_or_else(|| broken(format!("a position below {} was never computed", span.start)), Ok)
    }

    fn enter(&mut self, span: &Span, tokens: &[u32]) {
        for (position, &token) in (span.start..).zip(tokens) {
            let page = span.pages[(position / PAGE_TOKENS) as usize];
            self.pages[page as usize][(position % PAGE_TOKENS) as usize] = Some(token);
        }
    }

    fn check(&self, batch: &Batch) -> Result {
        let n_rows: u32 = batch.spans.iter().map(|s| s.rows).sum();
        if n_rows == 0 || n_rows as usize != batch.tokens.len() || n_rows > self.limits.n_batch {
            return broken(format!("{n_rows} rows in spans, {} tokens", batch.tokens.len()));
        }
        if batch.outputs.len() > self.limits.n_outputs as usize || batch.outputs.iter().any(|&o| o >= n_rows) {
            return broken(format!("outputs {:?} of {n_rows} rows", batch.outputs));
        }
        let mut writers = HashMap::new();
        for span in &batch.spans {
            let n_pages = (span.start + span.rows).div_ceil(PAGE_TOKENS) as usize;
            if span.rows == 0 || span.slot >= self.limits.n_slots || span.pages.len() != n_pages {
                return broken(format!("{span:?}"));
            }
            if span.pages.iter().any(|&page| page >= self.limits.n_pages) {
                return broken(format!("{span:?} of {} pages", self.limits.n_pages));
            }
            let written = span.pages[(span.start / PAGE_TOKENS) as usize..].iter().map(|&p| ("page", p));
            for thing in written.chain([("slot", span.slot)]) {
                if writers.insert(thing, ()).is_some() {
                    return broken(format!("{} {} is written twice", thing.0, thing.1));
                }
            }
        }
        Ok(())
    }
}

impl Executor for Mock {
    fn config(&self) -> &Config {
        &self.config
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn forward(&mut self, batch: &Batch, logits: &mut Vec<f32>) -> Result {
        logits.clear();
        let mut out = Vec::new();
        let (config, script) = (self.config.clone(), self.script.clone());
        let mut n = 0u32;
        self.run(batch, |history| {
            if batch.outputs.contains(&n) {
                out.extend(row_logits(&config, &script, history));
            }
            n += 1;
        })?;
        logits.append(&mut out);
        Ok(())
    }

    fn chooses(&self) -> bool {
        self.script.chooses
    }

    fn submit(&mut self, batch: &Batch, choose: &Choose) -> Result {
        let Choose { n_tokens, draws, fed } = choose;
        if !self.script.chooses || self.in_flight.len() >= MAX_IN_FLIGHT {
            return broken(format!("{} batches are in flight", self.in_flight.len()));
        }
        let mut batch = batch.clone();
        for (token, from) in batch.tokens.iter_mut().zip(fed) {
            let Some(from) = from else { continue };
            let Some(&id) = self.chosen.get(*from as usize) else { return broken(format!("no output {from}")) };
            // What is no token is read as the last one, as an embedding does.
            *token = id.min(self.config.n_vocab as u32 - 1);
        }
        let mut logits = Vec::new();
        self.forward(&batch, &mut logits)?;
        let rows = logits.chunks_exact(self.config.n_vocab).enumerate();
        let choose = |(i, row): (usize, &[f32])| {
            let row = if row.iter().any(|l| l.is_nan()) { &[][..] } else { &row[..*n_tokens as usize] };
            draws.get(i).map_or_else(|| argmax(row), |how| draw_one(row, how)).unwrap_or(NO_TOKEN)
        };
        self.chosen = rows.map(choose).collect();
        let late = self.script.fail_late_on.is_some_and(|token| batch.tokens.contains(&token));
        self.in_flight.push_back(if late {
            Err(Error::Device("a failure seen late".to_owned()))
        } else {
            Ok(self.chosen.clone())
        });
        let mut log = self.log.lock().expect("no test holds the log over a panic");
        log.submitted += 1;
        log.fed += usize::from(fed.iter().any(Option::is_some));
        Ok(())
    }

    fn collect(&mut self, ids: &mut Vec<u32>) -> Result {
        let chosen = self.in_flight.pop_front();
        *ids = chosen.unwrap_or_else(|| broken("nothing was submitted".to_owned()))?;
        Ok(())
    }

    fn drafts(&self) -> bool {
        true
    }

    /// Three of four guesses are right.
    fn draft(&mut self, batch: &Batch, n_tokens: u32, n: u32, ids: &mut Vec<u32>) -> Result {
        ids.clear();
        let mut first = 0;
        for span in &batch.spans {
            let rows = first..first + span.rows;
            first = rows.end;
            for output in batch.outputs.iter().filter(|output| rows.contains(output)) {
                let position = span.start + (output - rows.start);
                if span.pages.len() < (position + n).div_ceil(PAGE_TOKENS) as usize {
                    return broken(format!("no pages for {n} guesses after position {position}"));
                }
                let mut history = self.history(&Span { start: position + 1, ..span.clone() })?;
                history.push(batch.tokens[*output as usize]);
                for _ in 0..n {
                    let token = next_token(&self.config, &self.script, &history);
                    let wrong = hash(&history) >> 40 & 3 == 0;
                    let token = if wrong { (token + 1) % n_tokens } else { token };
                    ids.push(token);
                    history.push(token);
                }
            }
        }
        Ok(())
    }

    /// The hidden state of a token is its id, in all dimensions.
    fn hidden(&mut self, batch: &Batch, out: &mut Vec<f32>) -> Result {
        out.clear();
        let n_embd = self.config.n_embd;
        self.run(batch, |history| {
            let id = history.last().copied().unwrap_or_default();
            out.extend(std::iter::repeat_n(id as f32, n_embd));
        })
    }

    fn copy_state(&mut self, from: u32, to: u32) -> Result {
        let Some(&state) = self.states.get(from as usize) else { return broken(format!("no slot {from}")) };
        let Some(slot) = self.states.get_mut(to as usize) else { return broken(format!("no slot {to}")) };
        *slot = state;
        self.log.lock().expect("no test holds the log over a panic").copies += 1;
        Ok(())
    }
}

/// FNV-1a over the tokens' bytes.
fn hash(tokens: &[u32]) -> u64 {
    let bytes = tokens.iter().flat_map(|t| t.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// Zero but for the next token, and a runner-up.
fn row_logits(config: &Config, script: &Script, history: &[u32]) -> Vec<f32> {
    let n = config.n_vocab;
    if script.nan_after.is_some_and(|token| history.last() == Some(&token)) {
        return vec![f32::NAN; n];
    }
    let mut logits = vec![0.0; n];
    logits[(hash(history) >> 32) as usize % n] = 1.0;
    logits[next_token(config, script, history) as usize] = 2.0;
    logits
}

fn next_token(config: &Config, script: &Script, history: &[u32]) -> u32 {
    let scripted = script.replies.iter().find_map(|(prompt, reply)| {
        let said = history.strip_prefix(prompt.as_slice())?;
        reply.strip_prefix(said)?.first().copied()
    });
    scripted.unwrap_or_else(|| {
        let token = (hash(history) % config.n_vocab as u64) as u32;
        if script.never == Some(token) { 0 } else { token }
    })
}

fn broken<T>(what: String) -> Result<T> {
    Err(Error::Batch(what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::Gguf;

    fn mock() -> Mock {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/zinc-tiny-qwen35moe.gguf");
        let config = Config::from_gguf(&Gguf::open(path.as_ref()).expect("a model")).expect("its shape");
        let limits = Limits { n_pages: 4, n_slots: 2, n_batch: 8, n_outputs: 2 };
        Mock::new(config, limits, Script::default())
    }

    fn batch(tokens: &[u32], start: u32, pages: &[u32]) -> Batch {
        let rows = tokens.len() as u32;
        let span = Span { slot: 0, start, rows, pages: pages.to_vec() };
        Batch { tokens: tokens.to_vec(), spans: vec![span], outputs: vec![rows - 1] }
    }

    #[test]
    fn a_wrong_page_or_position_is_noticed() {
        let mut mock = mock();
        let mut logits = Vec::new();
        mock.forward(&batch(&[1, 2, 3], 0, &[2]), &mut logits).expect("a good batch");
        assert_eq!(logits.len(), mock.config.n_vocab);
        mock.forward(&batch(&[4], 3, &[2]), &mut logits).expect("it goes on");
        assert!(mock.forward(&batch(&[5], 4, &[1]), &mut logits).is_err(), "another page");
        assert!(mock.forward(&batch(&[5], 6, &[2]), &mut logits).is_err(), "a gap");
        assert!(mock.forward(&batch(&[5], 3, &[2]), &mut logits).is_err(), "the state is further on");
        assert!(mock.forward(&batch(&[5], 0, &[9]), &mut logits).is_err(), "no such page");
    }
}
