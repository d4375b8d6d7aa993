//! The gated delta net: causal convolution, delta rule, gated norm.
//!
//! Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::elementwise::{sigmoid, silu};
use super::matmul::dot;
use super::{Batch, Tensor};
use crate::backend::{DeltaNetShape, L2_NORM_EPS};

/// Recurrent state of one layer, for every slot.
pub(super) struct Recurrent {
    /// The last `d_conv − 1` convolution inputs of a slot, `[d_conv − 1, conv_dim]`, oldest first.
    conv: Vec<f32>,
    conv_elems: usize,
    /// The states of a slot's heads, `[n_head_v, d_state (v), d_state (k)]`.
    state: Vec<f32>,
    state_elems: usize,
}

impl Recurrent {
    pub(super) fn new(n_slots: usize, conv_elems: usize, state_elems: usize) -> Recurrent {
        let zeros = |elems| vec![0.0; n_slots * elems];
        Recurrent { conv: zeros(conv_elems), conv_elems, state: zeros(state_elems), state_elems }
    }

    pub(super) fn copy(&mut self, from: usize, to: usize) {
        self.conv.copy_within(from * self.conv_elems..(from + 1) * self.conv_elems, to * self.conv_elems);
        self.state.copy_within(from * self.state_elems..(from + 1) * self.state_elems, to * self.state_elems);
    }

    /// `out[t, c] = SiLU(Σ_j w[c, j]·x[t − d_conv + 1 + j, c])`.
    pub(super) fn conv1d(&mut self, out: &mut Tensor, x: &Tensor, w: &[f32], shape: &DeltaNetShape, batch: &Batch) {
        let (d_conv, conv_dim) = (shape.d_conv as usize, shape.conv_dim() as usize);
        for (span, rows) in batch.spans_with_rows() {
            let past = &mut self.conv[span.slot as usize * self.conv_elems..][..self.conv_elems];
            if span.start == 0 {
                past.fill(0.0);
            }
            for m in rows {
                let (x, out) = (x.row(m), out.row_mut(m));
                for c in 0..conv_dim {
                    let taps = &w[c * d_conv..][..d_conv];
                    let older: f32 = (0..d_conv - 1).map(|j| taps[j] * past[j * conv_dim + c]).sum();
                    out[c] = silu(older + taps[d_conv - 1] * x[c]);
                }
                if d_conv > 1 {
                    past.copy_within(conv_dim.., 0);
                    past[(d_conv - 2) * conv_dim..].copy_from_slice(x);
                }
            }
        }
    }

    /// The delta rule, token by token; see [`Backend::ssm_delta_net`](crate::backend::Backend::ssm_delta_net).
    /// `scratch` is overwritten.
    pub(super) fn delta_net(
        &mut self,
        out: &mut Tensor,
        inputs: &Inputs<'_>,
        shape: &DeltaNetShape,
        batch: &Batch,
        scratch: &mut Vec<f32>,
    ) {
        let (n_head_v, d_state) = (shape.n_head_v as usize, shape.d_state as usize);
        for (span, rows) in batch.spans_with_rows() {
            let slot = &mut self.state[span.slot as usize * self.state_elems..][..self.state_elems];
            if span.start == 0 {
                slot.fill(0.0);
            }
            // The heads are independent: each runs over all tokens of the span, into [n_head_v, rows, d_state].
            scratch.clear();
            scratch.resize(n_head_v * rows.len() * d_state, 0.0);
            let heads = slot.par_chunks_mut(d_state * d_state).zip(scratch.par_chunks_mut(rows.len() * d_state));
            heads.enumerate().for_each(|(h, (state, out))| {
                let gates = inputs.gates(h);
                for (m, out) in rows.clone().zip(out.chunks_exact_mut(d_state)) {
                    let (decay, beta) = gates(m);
                    let [q, k, v] = inputs.qkv(m, h, shape);
                    pulp::Arch::new().dispatch(Step { state, q, k, v, decay, beta, out });
                }
            });
            for (i, m) in rows.clone().enumerate() {
                for (h, out) in out.row_mut(m).chunks_exact_mut(d_state).enumerate() {
                    out.copy_from_slice(&scratch[(h * rows.len() + i) * d_state..][..d_state]);
                }
            }
        }
    }
}

/// The operands of [`Recurrent::delta_net`].
pub(super) struct Inputs<'a> {
    pub(super) qkv: &'a Tensor,
    pub(super) alpha: &'a Tensor,
    pub(super) beta: &'a Tensor,
    pub(super) dt_bias: Option<&'a Vec<f32>>,
    pub(super) a: Option<&'a Vec<f32>>,
}

impl<'a> Inputs<'a> {
    /// Query, key and value of value head `h` in row `m`.
    fn qkv(&self, m: usize, h: usize, shape: &DeltaNetShape) -> [&'a [f32]; 3] {
        let (n_head_k, d_state) = (shape.n_head_k as usize, shape.d_state as usize);
        let row = self.qkv.row(m);
        [h % n_head_k, n_head_k + h % n_head_k, 2 * n_head_k + h].map(|head| &row[head * d_state..][..d_state])
    }

    /// For value head `h`, the decay `e^g` and step size `σ(beta)` of row `m`.
    fn gates(&self, h: usize) -> impl Fn(usize) -> (f32, f32) {
        let dt_bias = self.dt_bias.map_or(0.0, |bias| bias[h]);
        // The file holds −exp(A_log).
        let a = self.a.map_or(-1.0, |a| a[h]);
        move |m| {
            let g = softplus(f64::from(self.alpha.row(m)[h] + dt_bias)) * f64::from(a);
            (g.exp() as f32, sigmoid(self.beta.row(m)[h]))
        }
    }
}

/// `ln(1 + e^x)` without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// One token through one head.
struct Step<'a> {
    /// `S`, `[d_state (v), d_state (k)]`.
    state: &'a mut [f32],
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    decay: f32,
    beta: f32,
    out: &'a mut [f32],
}

impl WithSimd for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Step { state, q, k, v, decay, beta, out } = self;
        let d_state = q.len();
        // Both vectors are normalised; their factors are applied to the products they take part in.
        let inv_norm = |x: &[f32]| 1.0 / (dot(simd, x, x) + L2_NORM_EPS).sqrt();
        let (q_scale, k_scale) = (inv_norm(q) / (d_state as f32).sqrt(), inv_norm(k));
        for ((row, v), out) in state.chunks_exact_mut(d_state).zip(v).zip(out) {
            for s in &mut *row {
                *s *= decay;
            }
            let delta = beta * (v - k_scale * dot(simd, row, k));
            for (s, k) in row.iter_mut().zip(k) {
                *s += delta * k_scale * k;
            }
            *out = q_scale * dot(simd, row, q);
        }
    }
}
