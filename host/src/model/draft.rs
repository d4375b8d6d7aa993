//! Guessing tokens ahead: the multi-token-prediction block that some models carry after their layers.
//!
//! From the main network's last hidden state at position `t`, normed, `h[t]`, and the token after it, `x[t+1]`, it
//! guesses the token after that one:
//! - `u = eh_proj·[enorm(embed(x[t+1])) | hnorm(h[t])]`;
//! - one decoder layer with full attention over its own keys and values, at position `t`;
//! - `h' = shared_head_norm(u)`, and logits of `x[t+2]` by the main network's head.
//!
//! For further guesses `h'` stands for the hidden state and the guess for the token, one position on. Keys and values
//! lie in the pages of the main network's, as one layer more.
//!
//! A guess costs nothing but time when it is wrong: the main network computes it like any token, and its own choice
//! decides. So whatever the guesses are, the tokens are the same.

use super::executor::NO_TOKEN;
use super::layers::{Ffn, Mixer, Scratch};
use super::weights::{Model, Nextn};
use crate::backend::{Backend, Batch, Choose, Error, PAGE_TOKENS, Result, Span};

/// The block, and its activations.
pub(super) struct Drafter<B: Backend> {
    weights: Nextn<B>,
    /// Which of the cache's layers is its own.
    layer: u32,
    n_vocab: usize,
    /// `enorm(embed(x))` and `hnorm(h)`, `[M, n_embd]`, and both side by side, `[M, 2·n_embd]`.
    token: B::Tensor,
    hidden: B::Tensor,
    pair: B::Tensor,
    /// `h'` of the outputs, `[outputs, n_embd]`.
    next: B::Tensor,
    logits: Vec<f32>,
}

/// Kinds of recorded steps, beside the main network's, which are numbers of tokens.
const FIRST: u32 = 1 << 30;
const FURTHER: u32 = 1 << 31;

impl<B: Backend> Drafter<B> {
    pub(super) fn new(
        backend: &mut B,
        weights: Nextn<B>,
        layer: u32,
        [n_embd, n_vocab]: [usize; 2],
        [n_batch, n_outputs]: [u32; 2],
    ) -> Result<Self> {
        let n_embd = n_embd as u32;
        Ok(Drafter {
            weights,
            layer,
            n_vocab,
            token: backend.tensor(n_batch, n_embd)?,
            hidden: backend.tensor(n_batch, n_embd)?,
            pair: backend.tensor(n_batch, 2 * n_embd)?,
            next: backend.tensor(n_outputs, n_embd)?,
            logits: Vec::new(),
        })
    }

    /// Guesses `n` tokens after those of each output, `[outputs, n]`. `batch` has the rows that the main network has
    /// just computed, each with the token that follows it; their hidden states are in `s.norm`.
    #[expect(clippy::too_many_arguments, reason = "a part of the session, which has these")]
    pub(super) fn draft(
        &mut self,
        b: &mut B,
        s: &mut Scratch<B>,
        cache: &mut B::Cache,
        model: &mut Model<B>,
        batch: &Batch,
        n_tokens: u32,
        n: u32,
    ) -> Result<Vec<u32>> {
        let n_outputs = batch.outputs.len();
        let mut guesses = vec![NO_TOKEN; n_outputs * n as usize];
        let mut step = batch.clone();
        for i in 0..n.max(1) {
            let ids = self.step(b, s, cache, model, &step, n_tokens, i == 0)?;
            if n_outputs == 0 || n == 0 {
                break;
            }
            guesses.iter_mut().skip(i as usize).step_by(n as usize).zip(&ids).for_each(|(to, id)| *to = *id);
            if i == 0 {
                step = following(batch, n)?;
            } else {
                step.spans.iter_mut().for_each(|span| span.start += 1);
            }
            // What is no token has no row in the table; whatever follows from it is a guess as bad.
            step.tokens = ids.iter().map(|id| if *id < n_tokens { *id } else { 0 }).collect();
        }
        Ok(guesses)
    }

    #[expect(clippy::too_many_arguments, reason = "a part of the session, which has these")]
    fn step(
        &mut self,
        b: &mut B,
        s: &mut Scratch<B>,
        cache: &mut B::Cache,
        model: &mut Model<B>,
        batch: &Batch,
        n_tokens: u32,
        first: bool,
    ) -> Result<Vec<u32>> {
        let choose = Choose { n_tokens, ..Choose::default() };
        let on_device = if B::CHOOSES { b.choosing_batch(batch, &choose)? } else { b.batch(batch)? };
        let n_outputs = batch.outputs.len();
        let batch = &on_device;
        let (d, t) = (&mut *self, &mut *s);
        b.run_recorded(batch, n_tokens | if first { FIRST } else { FURTHER }, move |b| {
            let w = &mut d.weights;
            b.embed(&mut t.x, w.token_embd.as_ref().unwrap_or(&model.token_embd), batch)?;
            b.rms_norm(&mut d.token, &t.x, &w.token_norm, w.eps, batch)?;
            let hidden = if first { &t.norm } else { &d.next };
            b.rms_norm(&mut d.hidden, hidden, &w.hidden_norm, w.eps, batch)?;
            b.join_rows(&mut d.pair, &d.token, &d.hidden, batch)?;
            b.matmul(&mut t.x, &w.proj, &d.pair, batch)?;
            if let Mixer::Attention(attention) = &w.layer.mixer {
                b.attention_layer(attention, t, cache, d.layer, batch)?;
            }
            match &w.layer.ffn {
                Ffn::Dense(ffn) => b.dense_ffn_layer(ffn, t, batch)?,
                Ffn::Moe(moe) => b.moe_layer(moe, t, batch)?,
            }
            if n_outputs == 0 {
                return Ok(());
            }
            b.rms_norm(&mut t.norm, &t.x, &w.head_norm, w.eps, batch)?;
            b.gather_outputs(&mut d.next, &t.norm, batch)?;
            b.head(&mut t.logits, w.head.as_ref().unwrap_or(model.head()), &d.next, batch)?;
            if B::CHOOSES { b.choose(&t.logits, n_tokens, batch) } else { Ok(()) }
        })?;
        let mut ids = Vec::new();
        if n_outputs == 0 {
            return Ok(ids);
        }
        if B::CHOOSES {
            b.queue_chosen(n_outputs as u32)?;
            b.read_chosen(&mut ids)?;
        } else {
            b.read(&s.logits, n_outputs as u32, &mut self.logits)?;
            ids.extend(self.logits.chunks_exact(self.n_vocab).map(|row| largest(&row[..n_tokens as usize])));
        }
        Ok(ids)
    }
}

/// One row for each output of a batch: the position after it, for the first of `n − 1` guesses more.
fn following(batch: &Batch, n: u32) -> Result<Batch> {
    let mut next = Batch::default();
    let mut outputs = batch.outputs.iter().peekable();
    let mut first = 0;
    for span in &batch.spans {
        let end = first + span.rows;
        while let Some(row) = outputs.next_if(|row| **row < end) {
            let start = span.start + (row - first) + 1;
            if u64::from(start) + u64::from(n - 1) > span.pages.len() as u64 * u64::from(PAGE_TOKENS) {
                return Err(Error::Batch(format!("no pages for {n} guesses from position {start} on")));
            }
            next.outputs.push(next.spans.len() as u32);
            next.spans.push(Span { start, rows: 1, ..span.clone() });
        }
        first = end;
    }
    let slots = next.spans.iter().map(|span| span.slot);
    if next.spans.len() != batch.outputs.len()
        || slots.collect::<std::collections::HashSet<_>>().len() != next.spans.len()
    {
        return Err(Error::Batch("a sequence with two outputs to guess from".to_owned()));
    }
    Ok(next)
}

/// The index of the largest logit, the lowest on a tie.
fn largest(row: &[f32]) -> u32 {
    (0..).zip(row).fold((NO_TOKEN, f32::NEG_INFINITY), |best, (i, l)| if *l > best.1 { (i, *l) } else { best }).0
}
