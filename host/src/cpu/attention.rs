//! Attention over paged keys and values.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::matmul::dot;
use super::{Batch, Row, Tensor, zeros};
use crate::backend::{AttentionShape, PAGE_TOKENS, Pairing, Result, Rope, Span};

/// Keys and values of one layer, `[n_pages · PAGE_TOKENS, kv_dim]` each.
pub(super) struct Kv {
    kv_dim: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Kv {
    pub(super) fn new(n_pages: usize, kv_dim: usize) -> Result<Kv> {
        let rows = n_pages * PAGE_TOKENS as usize;
        Ok(Kv { kv_dim, k: zeros("keys", rows, kv_dim)?, v: zeros("values", rows, kv_dim)? })
    }

    /// Where the keys and values of a sequence's position start.
    fn offset(&self, span: &Span, position: u32) -> usize {
        let page = span.pages[(position / PAGE_TOKENS) as usize];
        (page as usize * PAGE_TOKENS as usize + (position % PAGE_TOKENS) as usize) * self.kv_dim
    }

    pub(super) fn write(&mut self, k: &Tensor, v: &Tensor, batch: &Batch) {
        for (m, row) in batch.rows.iter().enumerate() {
            let at = self.offset(&batch.spans[row.span], row.position);
            self.k[at..][..self.kv_dim].copy_from_slice(k.row(m));
            self.v[at..][..self.kv_dim].copy_from_slice(v.row(m));
        }
    }

    /// `out[m, h] = Σ_t p_t·v_t` with `p = softmax(scale·q·k_t)` over the positions `t` that row `m` sees.
    pub(super) fn attend(
        &self,
        out: &mut [f32],
        q: &Tensor,
        shape: &AttentionShape,
        sinks: Option<&Vec<f32>>,
        batch: &Batch,
    ) {
        let (n_head, head_dim) = (shape.n_head as usize, shape.head_dim as usize);
        let per_kv_head = n_head / shape.n_head_kv as usize;
        out.par_chunks_mut(head_dim).enumerate().for_each_init(Vec::new, |scores, (i, out)| {
            let (m, h) = (i / n_head, i % n_head);
            let Row { span, position } = batch.rows[m];
            pulp::Arch::new().dispatch(Head {
                kv: self,
                span: &batch.spans[span],
                first: shape.window.map_or(0, |window| (position + 1).saturating_sub(window)),
                last: position,
                kv_column: h / per_kv_head * head_dim,
                scale: shape.scale,
                sink: sinks.map(|sinks| sinks[h]),
                q: &q.row(m)[h * head_dim..][..head_dim],
                scores,
                out,
            });
        });
    }
}

/// One query head of one row.
struct Head<'a> {
    kv: &'a Kv,
    span: &'a Span,
    /// First and last position seen.
    first: u32,
    last: u32,
    /// Where the head starts in a row of keys or values.
    kv_column: usize,
    scale: f32,
    sink: Option<f32>,
    q: &'a [f32],
    scores: &'a mut Vec<f32>,
    out: &'a mut [f32],
}

impl WithSimd for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Head { kv, span, first, last, kv_column, scale, sink, q, scores, out } = self;
        let head_dim = q.len();
        scores.clear();
        for t in first..=last {
            let k = &kv.k[kv.offset(span, t) + kv_column..][..head_dim];
            scores.push(scale * dot(simd, q, k));
        }
        let max = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
        // The sink takes its share of the weight and contributes no value.
        let mut sum = sink.map_or(0.0, |sink| f64::from((sink - max).exp()));
        out.fill(0.0);
        for (t, score) in (first..=last).zip(&*scores) {
            let p = (score - max).exp();
            sum += f64::from(p);
            let v = &kv.v[kv.offset(span, t) + kv_column..][..head_dim];
            for (out, v) in out.iter_mut().zip(v) {
                *out += p * v;
            }
        }
        let inv_sum = (1.0 / sum) as f32;
        for out in out {
            *out *= inv_sum;
        }
    }
}

/// Rotates the first `n_rot` dimensions of every head by the row's position.
pub(super) fn rope(x: &mut Tensor, head_dim: usize, rope: &Rope, batch: &Batch) {
    let half = rope.inv_freq.len();
    let magnitude = f64::from(rope.magnitude);
    x.par_rows_mut(batch.rows.len()).zip(&batch.rows).for_each(|(x, row)| {
        let turns: Vec<(f32, f32)> = rope
            .inv_freq
            .iter()
            .map(|inv_freq| {
                let (sin, cos) = (f64::from(row.position) * inv_freq).sin_cos();
                ((sin * magnitude) as f32, (cos * magnitude) as f32)
            })
            .collect();
        for head in x.chunks_exact_mut(head_dim) {
            for (i, (sin, cos)) in turns.iter().enumerate() {
                let (a, b) = match rope.pairing {
                    Pairing::Adjacent => (2 * i, 2 * i + 1),
                    Pairing::SplitHalf => (i, i + half),
                };
                (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
            }
        }
    });
}

/// Splits rows of `[n_head, 2, head_dim]` into queries and gates.
pub(super) fn split_gate(q: &mut Tensor, gate: &mut Tensor, qg: &Tensor, head_dim: usize, n_rows: usize) {
    for m in 0..n_rows {
        let heads = q.row_mut(m).chunks_exact_mut(head_dim).zip(gate.row_mut(m).chunks_exact_mut(head_dim));
        for ((q, gate), qg) in heads.zip(qg.row(m).chunks_exact(2 * head_dim)) {
            q.copy_from_slice(&qg[..head_dim]);
            gate.copy_from_slice(&qg[head_dim..]);
        }
    }
}
