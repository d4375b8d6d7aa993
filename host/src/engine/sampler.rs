//! From logits to the next token.
//!
//! The steps, each off at its neutral value: penalties, logit bias, mask, temperature, top-k, top-p, min-p, draw.
//! Log probabilities are those of the model's own distribution, before any of them.
//!
//! Where nothing comes before the temperature and no log probability is asked for, the device can choose
//! ([`Sampler::next_draw`]): by the same rule, [`Draw`], with the same random numbers. Here weights are f64, there f32
//! with exact sums, so that the two differ where the draw or a cut is within about 1e-6 of a border.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use super::event::SampledToken;
use super::request::{Sampling, TokenMask};
use super::rng;
use crate::backend::Draw;

/// A sampling parameter with a value that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} = {value}: {why}")]
pub struct InvalidSampling {
    /// The parameter.
    pub field: &'static str,
    /// Its value.
    pub value: f64,
    /// What it should be.
    pub why: &'static str,
}

/// Why no token could be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The model computed something that is not a number.
    #[error("the logit of token {id} is {value}: the model's output is broken")]
    NotFinite {
        /// The first such token.
        id: usize,
        /// Its logit.
        value: f32,
    },
    /// The same, found on the device.
    #[error("the model's output is broken")]
    Broken,
    /// The mask does not know what may come next.
    #[error("{0}")]
    Mask(String),
    /// Mask and biases together forbid everything.
    #[error("no token is allowed by the mask and the biases")]
    NothingAllowed,
}

/// One request's sampler: its parameters and what it has seen.
pub struct Sampler {
    params: Sampling,
    seed: u64,
    /// Draws so far: the counter of the next one.
    drawn: u64,
    logprobs: Option<u8>,
    /// Ids from here on pad the matrix and have no text.
    n_tokens: usize,
    /// Tokens that `repeat_penalty` concerns: prompt and reply.
    seen: HashSet<u32>,
    /// How often the reply has each token.
    counts: HashMap<u32, u32>,
    candidates: Vec<Candidate>,
}

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    id: u32,
    logit: f32,
}

/// Largest logit first, lowest id first among equals, 0 and −0 too: a total order, so that results repeat exactly.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    (b.logit + 0.0).total_cmp(&(a.logit + 0.0)).then(a.id.cmp(&b.id))
}

impl Sampler {
    /// A sampler for one reply to `prompt`. Ids from `n_tokens` on are never chosen.
    ///
    /// # Errors
    /// A parameter is out of its range.
    pub fn new(
        params: Sampling,
        prompt: &[u32],
        n_tokens: usize,
        logprobs: Option<u8>,
    ) -> Result<Self, InvalidSampling> {
        validate(&params, n_tokens)?;
        let seen = if params.repeat_penalty == 1.0 { HashSet::new() } else { prompt.iter().copied().collect() };
        let seed = params.seed.unwrap_or_else(rng::fresh_seed);
        Ok(Self { params, seed, drawn: 0, logprobs, n_tokens, seen, counts: HashMap::new(), candidates: Vec::new() })
    }

    /// Whether the next token follows from the logits by a [`Draw`] alone, and nothing else is asked about it.
    pub fn only_draws(&self) -> bool {
        let p = &self.params;
        self.logprobs.is_none()
            && p.logit_bias.is_empty()
            && (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) == (1.0, 0.0, 0.0)
    }

    /// Whether the next token is the one with the largest logit.
    pub fn is_greedy(&self) -> bool {
        self.params.temperature == 0.0
    }

    /// How the next token is drawn; each call is for one token.
    pub fn next_draw(&mut self) -> Draw {
        if self.is_greedy() {
            return Draw::GREEDY;
        }
        let uniform = rng::uniform(self.seed, self.drawn);
        self.drawn += 1;
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.params;
        Draw { temperature, top_k: u32::try_from(top_k).unwrap_or(0), top_p, min_p, uniform }
    }

    /// Chooses the next token. `logits`, `[n_vocab]`, is used up.
    ///
    /// # Errors
    /// A logit is NaN or +∞, or nothing may follow.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        mask: Option<&mut (dyn TokenMask + '_)>,
    ) -> Result<SampledToken, SampleError> {
        check(logits)?;
        let n_tokens = self.n_tokens.min(logits.len());
        logits[n_tokens..].fill(f32::NEG_INFINITY);
        let model = self.logprobs.map(|n| LogProbs::new(logits, usize::from(n)));

        self.penalise(logits);
        if let Some(mask) = mask {
            mask.allow(logits).map_err(SampleError::Mask)?;
        }
        let id = if self.is_greedy() {
            argmax(logits)
        } else {
            let how = self.next_draw();
            draw(logits, &how, &mut self.candidates)
        };
        let id = id.ok_or(SampleError::NothingAllowed)?;

        self.note(id);
        Ok(match model {
            Some(model) => SampledToken { id, logprob: model.of(id), top: model.top },
            None => SampledToken::bare(id),
        })
    }

    fn note(&mut self, id: u32) {
        if self.params.repeat_penalty != 1.0 {
            self.seen.insert(id);
        }
        if self.params.frequency_penalty != 0.0 || self.params.presence_penalty != 0.0 {
            *self.counts.entry(id).or_insert(0) += 1;
        }
    }

    fn penalise(&self, logits: &mut [f32]) {
        let p = &self.params;
        for &id in &self.seen {
            let Some(l) = logits.get_mut(id as usize) else { continue };
            *l = if *l > 0.0 { *l / p.repeat_penalty } else { *l * p.repeat_penalty };
        }
        for (&id, &count) in &self.counts {
            let Some(l) = logits.get_mut(id as usize) else { continue };
            *l -= p.frequency_penalty * count as f32 + p.presence_penalty;
        }
        for &(id, bias) in &p.logit_bias {
            if let Some(l) = logits.get_mut(id as usize) {
                *l += bias;
            }
        }
    }
}

/// [`draw`] with memory of its own.
pub(super) fn draw_one(logits: &[f32], how: &Draw) -> Option<u32> {
    draw(logits, how, &mut Vec::new())
}

/// Draws a token; `None` if all logits are −∞. `candidates` is memory for the work.
fn draw(logits: &[f32], how: &Draw, candidates: &mut Vec<Candidate>) -> Option<u32> {
    let c = candidates;
    c.clear();
    c.extend((0u32..).zip(logits).filter(|(_, l)| **l > f32::NEG_INFINITY).map(|(id, &logit)| Candidate { id, logit }));
    let max = c.iter().map(|c| c.logit).max_by(f32::total_cmp)?;
    // Relative weights; the largest logit is taken off first, so that a tiny temperature cannot overflow.
    let inv_temperature = 1.0 / f64::from(how.temperature);
    let weight = |c: &Candidate| (f64::from(c.logit - max) * inv_temperature).exp();

    let n = c.len();
    let k = how.top_k as usize;
    if k > 0 && k < n {
        rank(c, k);
        c.truncate(k);
    }
    if how.top_p < 1.0 {
        keep_nucleus(c, f64::from(how.top_p), weight);
    }
    if c.len() < n || how.top_p < 1.0 {
        c.sort_unstable_by_key(|c| c.id);
    }
    if how.min_p > 0.0 {
        // The most probable token has weight 1.
        let least = f64::from(how.min_p);
        c.retain(|c| weight(c) >= least);
    }

    let total: f64 = c.iter().map(weight).sum();
    let mut left = rng::unit(how.uniform) * total;
    for c in c.iter() {
        left -= weight(c);
        if left < 0.0 {
            return Some(c.id);
        }
    }
    // Rounding left a sliver: the last candidate that could have been drawn.
    c.iter().rev().find(|c| weight(c) > 0.0).map(|c| c.id)
}

/// Brings the `k` best candidates to the front, in order; the others stay behind them in any order.
fn rank(c: &mut [Candidate], k: usize) {
    if k < c.len() {
        c.select_nth_unstable_by(k, by_rank);
    }
    let k = k.min(c.len());
    c[..k].sort_unstable_by(by_rank);
}

/// Keeps the shortest run of best candidates whose probability reaches `p`, at least one.
fn keep_nucleus(c: &mut Vec<Candidate>, p: f64, weight: impl Fn(&Candidate) -> f64) {
    let goal = p * c.iter().map(&weight).sum::<f64>();
    // The nucleus is nearly always a few tokens out of a hundred thousand: rank a few, more only if they fall short.
    let mut ranked = 256;
    loop {
        rank(c, ranked);
        let mut sum = 0.0;
        for (i, candidate) in c.iter().take(ranked).enumerate() {
            sum += weight(candidate);
            if sum >= goal {
                c.truncate(i + 1);
                return;
            }
        }
        if ranked >= c.len() {
            return;
        }
        ranked *= 16;
    }
}

/// The index of the largest logit, the lowest on a tie; `None` if all are −∞ or NaN.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let max = max(logits);
    let id = logits.iter().position(|&l| l == max && max > f32::NEG_INFINITY)?;
    u32::try_from(id).ok()
}

/// Lanes of the passes over all logits: enough for any vector unit. A vocabulary of 250k is read for every token, and
/// one comparison at a time takes longer than the model on a fast GPU.
const LANES: usize = 16;

/// The largest value; NaN is passed over.
fn max(logits: &[f32]) -> f32 {
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut best = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        best.iter_mut().zip(chunk).for_each(|(best, &l)| *best = larger(*best, l));
    }
    best.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, larger)
}

/// Every logit is a number or −∞.
fn check(logits: &[f32]) -> Result<(), SampleError> {
    let good = |l: f32| l < f32::INFINITY;
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut all_good = [true; LANES];
    for chunk in chunks {
        all_good.iter_mut().zip(chunk).for_each(|(all, &l)| *all &= good(l));
    }
    if all_good.into_iter().all(|good| good) && rest.iter().all(|&l| good(l)) {
        return Ok(());
    }
    let (id, &value) = logits.iter().enumerate().find(|(_, l)| !good(**l)).expect("one of them is bad");
    Err(SampleError::NotFinite { id, value })
}

/// The model's distribution: `log p(i) = logits[i] − log Σ_j exp(logits[j])`.
struct LogProbs {
    log_sum: f64,
    logits: Vec<f32>,
    top: Vec<(u32, f32)>,
}

impl LogProbs {
    fn new(logits: &[f32], n_top: usize) -> Self {
        let max = max(logits);
        let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
        let log_sum = f64::from(max) + sum.ln();
        let mut top = Vec::new();
        if n_top > 0 {
            let mut all: Vec<_> = (0u32..).zip(logits).map(|(id, &logit)| Candidate { id, logit }).collect();
            rank(&mut all, n_top);
            top.extend(all.iter().take(n_top).map(|c| (c.id, (f64::from(c.logit) - log_sum) as f32)));
        }
        Self { log_sum, logits: logits.to_vec(), top }
    }

    fn of(&self, id: u32) -> f32 {
        (f64::from(self.logits[id as usize]) - self.log_sum) as f32
    }
}

fn validate(p: &Sampling, n_tokens: usize) -> Result<(), InvalidSampling> {
    let check = |field, value: f32, ok: bool, why| {
        if ok { Ok(()) } else { Err(InvalidSampling { field, value: f64::from(value), why }) }
    };
    check("temperature", p.temperature, p.temperature.is_finite() && p.temperature >= 0.0, "must be 0 or more")?;
    check("top_p", p.top_p, (0.0..=1.0).contains(&p.top_p), "must be from 0 to 1")?;
    check("min_p", p.min_p, (0.0..=1.0).contains(&p.min_p), "must be from 0 to 1")?;
    let repeat_ok = p.repeat_penalty.is_finite() && p.repeat_penalty > 0.0;
    check("repeat_penalty", p.repeat_penalty, repeat_ok, "must be more than 0")?;
    check("frequency_penalty", p.frequency_penalty, p.frequency_penalty.is_finite(), "must be a number")?;
    check("presence_penalty", p.presence_penalty, p.presence_penalty.is_finite(), "must be a number")?;
    for &(id, bias) in &p.logit_bias {
        if id as usize >= n_tokens {
            let why = "is not the id of a token";
            return Err(InvalidSampling { field: "logit_bias", value: f64::from(id), why });
        }
        check("logit_bias", bias, bias < f32::INFINITY, "must be a number")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
